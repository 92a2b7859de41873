"""`mega-fairseq doctor`: what works in this environment."""
