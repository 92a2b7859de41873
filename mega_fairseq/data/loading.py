"""The processes that load the batches of fairseq's iterators."""

from fairseq.data.iterators import EpochBatchIterator


def without_old_workers(iterator: EpochBatchIterator) -> EpochBatchIterator:
    """Ends the processes of each epoch with it, for data that have an iterator for each epoch.

    fairseq-fixed lets them wait for another epoch of the same iterator. torch then waits five seconds for each of them
    when Python collects the iterator.
    """
    iterator.persistent_workers = False
    return iterator
