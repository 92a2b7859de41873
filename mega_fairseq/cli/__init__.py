"""Small commands, and what they need to read the released code's files."""
