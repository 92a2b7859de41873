"""`mega-fairseq convert`: checkpoints of the released code for use with this plugin."""
