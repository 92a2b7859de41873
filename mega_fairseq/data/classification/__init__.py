"""Data of classification: `layouts` finds the files, `inputs` and `labels` read them, `examples` makes batches."""
