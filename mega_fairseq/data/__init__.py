"""Datasets for language modelling: one long sequence, cut into training segments or evaluation streams."""

from mega_fairseq.data.corpus import Corpus
from mega_fairseq.data.segments import SegmentDataset
from mega_fairseq.data.streams import StreamDataset

__all__ = ["Corpus", "SegmentDataset", "StreamDataset"]
