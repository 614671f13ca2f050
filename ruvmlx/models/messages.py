"""Text of unknown origin inside error messages."""


def one_line(value: object, limit: int = 120) -> str:
    """Printable, on one line, and short: names and messages from files may hold anything."""
    text = " ".join(str(value).split()).rstrip(".") or type(value).__name__
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= limit else f"{text[: limit - 40]}...{text[-37:]}"
