"""Documents: parallel text with the document of each line."""
