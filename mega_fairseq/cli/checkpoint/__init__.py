"""Reading checkpoints from any source without executing code in them."""
