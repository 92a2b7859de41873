"""`mega-fairseq sweep`: perplexity of a language model by chunk size and context length."""
