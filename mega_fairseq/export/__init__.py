"""Models as folders of ONNX graphs that run without PyTorch and fairseq.

graph.py            writes operators, weights in float32 or 8 bits
layers.py           norms, activations, projections, gates, feed-forward
ema.py, attention.py, cross_attention.py
                    the parts of a layer, in the forms that a graph needs
stacks.py           the graphs: encoder, step of the decoder, piece of a text, classifier
refusals.py         what they cannot express
folder.py           what `runtime/` reads; check.py compares it with the model
"""
