"""What this machine is and offers. Imports nothing above it."""
