"""What makes models faster and does not stand in them: CUDA graphs and packed weights.

Models run passes and steps through a small interface (models/passes.py), and models/attach.py puts the forms of this
folder in the place of the eager ones. Nothing here knows fairseq.
"""
