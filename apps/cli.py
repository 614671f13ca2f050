def main() -> None:
    print("ruvmlx")
