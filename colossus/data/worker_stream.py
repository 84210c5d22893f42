"""An IterableDataset read by one worker process, which collates whole batches there."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch._utils import ExceptionWrapper
from torch.utils.data import IterableDataset

from colossus.data.batch import Batch
from colossus.data.passes import EndOfPass
from colossus.data.seeded import CollateFn
from colossus.data.sources import BatchShard
from colossus.data.streams import SampleStream, StreamSource
from colossus.data.worker_loader import WorkerLoader, read_next
from colossus.random import GLOBAL_RNG


class _Piece(NamedTuple):
    """What a worker sends.

    Attributes:
        batch: that of this data rank, or the error that is in its place.
        step: number of the next one.
        state: of the stream behind it, pickled before the stream goes on.
    """

    batch: Batch | ExceptionWrapper
    step: int
    state: bytes


class _InWorker(IterableDataset[_Piece]):
    """The batches of a stream from a place on; from its first one without a place."""

    def __init__(self, stream: SampleStream, place: bytes | None) -> None:
        self._stream, self._place = stream, place

    def __iter__(self) -> Iterator[_Piece]:
        stream, batch = self._stream, None
        if self._place is None:
            stream.seek(0)
        else:
            stream.load_state_dict(pickle.loads(self._place))
        while True:
            try:
                batch = stream.read()
            except EndOfPass:
                return
            except Exception:
                batch = ExceptionWrapper(where="in the data loader worker")
            yield _Piece(batch, stream.step, pickle.dumps(stream.state_dict()))


class WorkerSampleStream(StreamSource):
    """A stream that one worker reads and collates, ahead of the step that needs it, through all passes: what the data
    holds goes on there as it would in this process. Going elsewhere takes another worker.

    Args:
        stream: which is not read here.
    """

    def __init__(self, stream: SampleStream) -> None:
        super().__init__(stream.passes, stream.shard)
        self._stream = stream
        self._pieces: Iterator[_Piece] | None = None
        #: the stream's state behind the last batch that was taken, pickled
        self._place: bytes | None = None

    def _depends_on_place_only(self) -> bool:
        return True

    def _read(self) -> Batch:
        if self._pieces is None:
            with GLOBAL_RNG.preserved():  # torch draws the worker's base seed from the global generator
                self._pieces = iter(WorkerLoader(_InWorker(self._stream, self._place), 1))
        try:
            piece: _Piece = read_next(self._pieces)
        except StopIteration:
            self._is_over = True
            raise EndOfPass from None
        except Exception:
            self._pieces = None
            raise
        self._place, self.step = piece.state, piece.step
        if isinstance(piece.batch, ExceptionWrapper):
            try:
                piece.batch.reraise()
            except Exception as error:
                raise error.with_traceback(None) from None  # see `read_next`
        return piece.batch

    def _rewind(self) -> None:
        self._pieces = self._place = None
        self.step, self._is_over = 0, False

    def state_dict(self) -> dict[str, Any]:
        if self._place is None:
            return self._stream.state_dict()
        state: dict[str, Any] = pickle.loads(self._place)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "passes" not in state:  # saved when the data was of another kind
            self.seek(state["step"])
            return
        self._rewind()
        self._place, self.step = pickle.dumps({key: state[key] for key in ("step", "passes")}), state["step"]


def sample_stream(
    dataset: IterableDataset[Any],
    shard: BatchShard,
    *,
    collate_fn: CollateFn | None = None,
    num_workers: int = 0,
) -> StreamSource:
    """The source that reads an IterableDataset.

    Raises:
        ValueError: for more than one worker.
    """
    if num_workers > 1:
        name = type(dataset).__name__
        raise ValueError(
            f"data.num_workers = {num_workers}, but {name} is an IterableDataset: each worker would read the whole "
            f"of it, and every sample would come {num_workers} times. num_workers=1 reads it ahead in one process; "
            f"for more, give a DataLoader of your own around a dataset that shares its samples out by "
            f"torch.utils.data.get_worker_info()"
        )
    stream = SampleStream(dataset, shard, collate_fn=collate_fn)
    return WorkerSampleStream(stream) if num_workers else stream
