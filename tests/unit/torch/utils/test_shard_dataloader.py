# SPDX-License-Identifier: Apache-2.0
"""`shard_dataloader`: every sample is seen, counts are equal, nothing is silently replaced."""

import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from modelopt.torch.utils.distributed import shard_dataloader


class _Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class _Stream(IterableDataset[int]):
    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.count = count
        self.fails_at = fails_at

    def __iter__(self) -> Iterator[int]:
        for index in range(self.count):
            if index == self.fails_at:
                raise OSError(f"sample {index} is unreadable")
            yield index


def _collate(samples: list[int]) -> list[int]:
    return samples


def _batches(loader: DataLoader[Any], world_size: int) -> list[list[list[int]]]:
    """Return each rank's batches."""
    shares = [shard_dataloader(loader, rank, world_size) for rank in range(world_size)]
    return [[torch.as_tensor(batch).reshape(-1).tolist() for batch in share] for share in shares]


def _check_shares(shares: list[list[list[int]]], count: int) -> None:
    """Every sample is seen, as few as needed twice, in batches of equal counts and sizes."""
    seen = Counter(sample for share in shares for batch in share for sample in batch)
    assert set(seen) == set(range(count))
    world_size = len(shares)
    assert sum(seen.values()) - count == -count % world_size
    sizes = [[len(batch) for batch in share] for share in shares]
    assert all(sizes[0] == other for other in sizes)


@pytest.mark.parametrize("dataset", [_Numbers, _Stream])
@pytest.mark.parametrize("count", [1, 2, 5, 7, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 2, None])
def test_every_sample_is_seen_and_counts_are_equal(
    dataset: Any, count: int, world_size: int, batch_size: int | None
) -> None:
    loader: DataLoader[Any] = DataLoader(dataset(count), batch_size=batch_size)
    _check_shares(_batches(loader, world_size), count)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("dataset", [_Numbers, _Stream])
def test_workers_take_their_share_of_the_rank(dataset: Any, count: int, workers: int) -> None:
    # Lists, for tensors would travel in shared memory.
    loader: DataLoader[Any] = DataLoader(
        dataset(count), batch_size=2, num_workers=workers, collate_fn=_collate
    )
    _check_shares(_batches(loader, 2), count)


def test_rank_takes_every_nth_sample_of_a_stream() -> None:
    shares = _batches(DataLoader(_Stream(7), batch_size=2), 2)
    assert shares == [[[0, 2], [4, 6]], [[1, 3], [5, 6]]]


def test_drop_last_drops_alike_on_every_rank() -> None:
    for dataset in (_Numbers(7), _Stream(7)):
        loader: DataLoader[Any] = DataLoader(dataset, batch_size=3, drop_last=True)
        assert [[len(batch) for batch in share] for share in _batches(loader, 2)] == [[3], [3]]


def test_shuffle_goes_on_in_one_order_of_all_ranks_until_set_epoch() -> None:
    loader: DataLoader[Any] = DataLoader(_Numbers(16), batch_size=2, shuffle=True)
    shares = [shard_dataloader(loader, rank, 2) for rank in range(2)]

    def epoch() -> list[list[int]]:
        return [torch.cat(list(share)).tolist() for share in shares]

    first = epoch()
    assert sorted(first[0] + first[1]) == list(range(16))
    assert first != [list(range(0, 16, 2)), list(range(1, 16, 2))]
    assert epoch() == first
    for share in shares:
        share.sampler.set_epoch(1)  # type: ignore[attr-defined]
    assert epoch() != first


def test_order_is_kept_without_shuffle() -> None:
    assert _batches(DataLoader(_Numbers(4), batch_size=1), 2) == [[[0], [2]], [[1], [3]]]


def _init_worker(_worker: int) -> None:
    pass


@pytest.mark.parametrize("dataset", [_Numbers(6), _Stream(6)])
def test_every_setting_that_does_not_sample_is_kept(dataset: Any) -> None:
    settings: dict[str, Any] = {
        "batch_size": 3,
        "num_workers": 1,
        "collate_fn": _collate,
        "pin_memory": True,
        "drop_last": True,
        "timeout": 5,
        "worker_init_fn": _init_worker,
        "multiprocessing_context": "spawn",
        "generator": torch.Generator(),
        "prefetch_factor": 3,
        "persistent_workers": True,
        "in_order": False,
    }
    loader: DataLoader[Any] = DataLoader(dataset, **settings)
    sharded = shard_dataloader(loader, 0, 2)
    own = {"self", "dataset", "shuffle", "sampler", "batch_sampler"}
    for name in set(inspect.signature(DataLoader.__init__).parameters) - own:
        assert getattr(sharded, name) == getattr(loader, name), name
    assert set(inspect.signature(DataLoader.__init__).parameters) - own - set(settings) <= {
        "pin_memory_device"
    }


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of world_size 2"):
        shard_dataloader(DataLoader(_Numbers(4)), rank, 2)


class _OwnSequence(SequentialSampler):
    pass


class _OwnBatches(BatchSampler):
    pass


class _OwnIteration(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([1])


NUMBERS = _Numbers(4)
REFUSED: dict[str, DataLoader[Any]] = {
    "DistributedSampler": DataLoader(
        NUMBERS, sampler=DistributedSampler(NUMBERS, num_replicas=2, rank=0)
    ),
    "SubsetRandomSampler": DataLoader(NUMBERS, sampler=SubsetRandomSampler([0, 1])),
    "WeightedRandomSampler": DataLoader(NUMBERS, sampler=WeightedRandomSampler([1.0], 4)),
    "RandomSampler": DataLoader(NUMBERS, sampler=RandomSampler(NUMBERS, replacement=True)),
    "RandomSampler ": DataLoader(NUMBERS, sampler=RandomSampler(NUMBERS, num_samples=2)),
    "SequentialSampler": DataLoader(NUMBERS, sampler=SequentialSampler(_Numbers(2))),
    "_OwnSequence": DataLoader(NUMBERS, sampler=_OwnSequence(NUMBERS)),
    "list": DataLoader(NUMBERS, sampler=[3, 1]),
    "_OwnBatches": DataLoader(
        NUMBERS, batch_sampler=_OwnBatches(SequentialSampler(NUMBERS), 2, False)
    ),
    "BatchSampler": DataLoader(
        NUMBERS, batch_sampler=BatchSampler(SubsetRandomSampler([0]), 1, False)
    ),
    "list ": DataLoader(NUMBERS, batch_sampler=[[0, 1], [2, 3]]),
    "_OwnIteration": _OwnIteration(NUMBERS),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sampling_that_a_share_cannot_keep_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name.strip()):
        shard_dataloader(REFUSED[name], 0, 2)


@pytest.mark.parametrize("dataset", [_Numbers(4), _Stream(4)])
def test_loader_that_is_sharded_already_is_refused(dataset: Any) -> None:
    sharded = shard_dataloader(DataLoader(dataset), 0, 2)
    with pytest.raises(ValueError, match="sharded already"):
        shard_dataloader(sharded, 0, 2)


def test_part_of_a_dataset_is_shared_out_as_a_subset() -> None:
    shares = _batches(DataLoader(Subset(_Numbers(9), range(4)), batch_size=2), 2)
    _check_shares(shares, 4)


def test_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="dataset is empty"):
        shard_dataloader(DataLoader(_Numbers(0)), 0, 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_empty_stream_is_refused_when_it_is_iterated(workers: int) -> None:
    for rank in range(2):
        sharded = shard_dataloader(DataLoader(_Stream(0), num_workers=workers), rank, 2)
        with pytest.raises(ValueError, match="stream is empty"):
            next(iter(sharded))


def test_share_without_a_batch_is_refused() -> None:
    loader: DataLoader[Any] = DataLoader(_Numbers(5), batch_size=4, drop_last=True)
    with pytest.raises(ValueError, match=r"5 samples on 2 ranks fill no batch of 4"):
        shard_dataloader(loader, 0, 2)


def test_stream_that_raises_half_way_raises_on_that_rank() -> None:
    loader: DataLoader[Any] = DataLoader(_Stream(7, fails_at=4))
    with pytest.raises(OSError, match="sample 4 is unreadable"):
        list(shard_dataloader(loader, 1, 2))


def test_anything_but_a_loader_is_refused() -> None:
    with pytest.raises(TypeError, match="needs a DataLoader; got list"):
        shard_dataloader([1, 2], 0, 2)  # type: ignore[arg-type]
