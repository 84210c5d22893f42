"""Places of tensors in one buffer, and runs of them under a limit."""

from __future__ import annotations

import pytest
import torch

from colossus.comm.flat_buffer import FlatBuffer, chunks
from colossus.comm.host_staging import BufferPool
from colossus.comm.messages import Messages, head_of
from colossus.comm.net import WireError


def test_a_buffer_has_every_tensor_once_and_a_flat_part_for_each_dtype() -> None:
    tensors = [
        torch.arange(15, dtype=torch.float32).view(3, 5),
        torch.tensor(7, dtype=torch.int64),
        torch.empty(0, 4),
        torch.arange(9).to(torch.bfloat16),
        torch.arange(11, dtype=torch.float32),
    ]
    flat = FlatBuffer.of(tensors)
    buffer = torch.full((flat.nbytes + 3,), 255, dtype=torch.uint8)
    for view, tensor in zip(flat.views(buffer), tensors, strict=True):
        assert view.shape == tensor.shape
        view.copy_(tensor)
    parts = {part.dtype: part for part in flat.parts(buffer)}
    assert torch.equal(parts[torch.float32], torch.cat([tensors[0].flatten(), tensors[4]]))
    assert parts[torch.int64].tolist() == [7]
    assert torch.equal(parts[torch.bfloat16], tensors[3])
    assert flat.dtype == torch.float32
    assert flat.tensor_bytes == sum(tensor.nbytes for tensor in tensors)
    assert flat.nbytes == 128 + 64 + 64
    pieces = torch.frombuffer(bytearray(b"".join(flat.memory_of(tensors))), dtype=torch.uint8)
    assert len(pieces) == flat.nbytes
    assert all(map(torch.equal, flat.views(pieces), tensors))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(5, [[3, 2], [9], [1, 1, 3], [4]]), (0, [[3], [2], [9], [1], [1], [3], [4]]), (None, [[3, 2, 9, 1, 1, 3, 4]])],
)
def test_runs_are_as_long_as_the_limit_allows(limit: int | None, expected: list[list[int]]) -> None:
    assert list(chunks([3, 2, 9, 1, 1, 3, 4], float, limit)) == expected


def test_a_payload_that_its_head_does_not_describe_ends_the_stream() -> None:
    def never(*_: object) -> None:
        raise AssertionError("it was taken")

    reader = Messages(BufferPool(), never, never)
    with pytest.raises(WireError, match="a payload of 128 bytes, where the tensors of its head take 64"):
        reader.allocate(head_of({}, [torch.zeros(3)]), 128)


@pytest.mark.parametrize(
    "sent", [[torch.zeros(6)], [torch.zeros(3, 2)], [torch.zeros(2, 3).int()], [torch.zeros(3)] * 2]
)
def test_tensors_of_another_form_than_the_readers_end_the_stream(sent: list[torch.Tensor]) -> None:
    for own in (torch.ones(2, 3), torch.ones(3, 2).T):
        reader = Messages(BufferPool(), print, print, lambda head, own=own: [own])
        reader.allocate(head_of({}, [own]), 64)
        with pytest.raises(WireError, match=r"tensors of .*, where the reader has torch.float32 \[2, 3\] for them"):
            reader.allocate(head_of({}, sent), 64)
