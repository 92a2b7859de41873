"""`mega-fairseq classify`: the classes of new inputs."""
