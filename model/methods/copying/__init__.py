"""Methods that copy text after a matching suffix."""
