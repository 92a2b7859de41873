"""`mega-fairseq inspect`: what a checkpoint contains."""
