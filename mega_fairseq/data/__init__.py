"""Datasets: one long sequence as training segments or evaluation streams, documents as windows of lines; bytes."""

from mega_fairseq.data.byte_numbers import ByteNumbers
from mega_fairseq.data.corpus import Corpus
from mega_fairseq.data.segments import SegmentDataset
from mega_fairseq.data.streams import StreamDataset
from mega_fairseq.data.windows import WindowDataset
