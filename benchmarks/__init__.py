"""Side-by-side measurements; each checks that its contenders are right before it times them."""
