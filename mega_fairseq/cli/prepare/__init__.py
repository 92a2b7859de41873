"""`mega-fairseq prepare`: data sets for sequence classification."""
