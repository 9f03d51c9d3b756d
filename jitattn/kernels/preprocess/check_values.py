"""What the tensors of ``preprocess_qkv`` and ``append_kv`` hold, where it can be looked at."""

from __future__ import annotations

from jitattn.kernels.preprocess.check import PreprocessCall, TokenCall


def check_values(call: TokenCall) -> None:
    """Raise ValueError for what a kernel would skip; everything that is looked at is on the CPU."""
    given = call.given
    _check_length_values(call)
    tokens = _tokens_that_count(call)
    if given.slots is not None:
        num_slots = call.k_cache.tensor.shape[0] * call.page_size
        slots = given.slots.tolist()
        for i in tokens:
            if slots[i] >= num_slots:
                raise ValueError(f"slots[{i}] is {slots[i]}: the cache ends at {num_slots}")
    rope = given.rope
    if rope is not None and rope.max_position is not None and tokens:
        highest = _highest_position(given, tokens)
        if highest >= rope.max_position:
            raise ValueError(
                f"positions reach {highest}: rope has max_position={rope.max_position}"
            )


def _tokens_that_count(call: TokenCall) -> list[int]:
    """The rows of qkv that belong to a request; nothing of others is read."""
    given, num_tokens = call.given, call.num_tokens
    ends = None if given.qo_indptr is None else given.qo_indptr.tolist()
    if given.seq_lens is None:
        return list(range(num_tokens if ends is None else ends[-1]))
    starts = range(num_tokens + 1) if ends is None else ends
    lengths = enumerate(given.seq_lens.tolist())
    return [i for b, n in lengths if n > 0 for i in range(starts[b], starts[b + 1])]


def _highest_position(given: PreprocessCall, tokens: list[int]) -> int:
    if given.positions is not None:
        return int(given.positions[..., tokens].max())
    assert given.seq_lens is not None
    positions = given.seq_lens.long() - 1
    if given.position_delta is not None:
        positions = positions + given.position_delta.long()
    return int(positions[given.seq_lens > 0].max())


def _check_length_values(call: TokenCall) -> None:
    given, pages = call.given, call.given.pages
    ends = None if given.qo_indptr is None else given.qo_indptr.tolist()
    if ends is not None and ends[-1] > call.num_tokens:
        raise ValueError(f"qo_indptr[-1] is {ends[-1]}: there are {call.num_tokens} tokens")
    lengths = [] if given.seq_lens is None else given.seq_lens.tolist()
    for b, length in enumerate(lengths):
        q_len = 1 if ends is None else ends[b + 1] - ends[b]
        limit = call.max_kv_len
        if pages is not None:
            limit = pages.request_capacity(b, call.page_size)
        if length > limit:
            raise ValueError(f"seq_lens[{b}] is {length}: its pages hold {limit} tokens")
        if length > 0 and pages is not None:
            pages.check_row(b)
        if 0 < length < q_len:
            raise ValueError(f"seq_lens[{b}] is {length}: the request has {q_len} new tokens")
