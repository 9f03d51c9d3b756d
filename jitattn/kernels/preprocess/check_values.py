"""What the tensors of ``preprocess_qkv`` and ``append_kv`` hold, where it can be looked at."""

from __future__ import annotations

from jitattn.kernels.preprocess.check import Arguments, TokenCall


def check_values(call: TokenCall) -> None:
    """Raise ValueError for what a kernel would skip; everything that is looked at is on the CPU."""
    arguments = call.arguments
    _check_length_values(call)
    tokens = _tokens_that_count(call)
    if arguments.slots is not None:
        num_slots = call.k_cache.tensor.shape[0] * call.page_size
        slots = arguments.slots.tolist()
        for i in tokens:
            if slots[i] >= num_slots:
                raise ValueError(f"slots[{i}] is {slots[i]}: the cache ends at {num_slots}")
    rope = arguments.rope
    if rope is not None and rope.max_position is not None and tokens:
        highest = _highest_position(arguments, tokens)
        if highest >= rope.max_position:
            raise ValueError(
                f"positions reach {highest}: rope has max_position={rope.max_position}"
            )


def _tokens_that_count(call: TokenCall) -> list[int]:
    """The rows of qkv that belong to a request; nothing of others is read."""
    arguments, num_tokens = call.arguments, call.num_tokens
    ends = None if arguments.qo_indptr is None else arguments.qo_indptr.tolist()
    if arguments.seq_lens is None:
        return list(range(num_tokens if ends is None else ends[-1]))
    starts = range(num_tokens + 1) if ends is None else ends
    lengths = enumerate(arguments.seq_lens.tolist())
    return [i for b, n in lengths if n > 0 for i in range(starts[b], starts[b + 1])]


def _highest_position(arguments: Arguments, tokens: list[int]) -> int:
    if arguments.positions is not None:
        return int(arguments.positions[..., tokens].max())
    assert arguments.seq_lens is not None
    positions = arguments.seq_lens.long() - 1
    if arguments.position_delta is not None:
        positions = positions + arguments.position_delta.long()
    return int(positions[arguments.seq_lens > 0].max())


def _check_length_values(call: TokenCall) -> None:
    arguments, pages = call.arguments, call.arguments.pages
    ends = None if arguments.qo_indptr is None else arguments.qo_indptr.tolist()
    if ends is not None and ends[-1] > call.num_tokens:
        raise ValueError(f"qo_indptr[-1] is {ends[-1]}: there are {call.num_tokens} tokens")
    lengths = [] if arguments.seq_lens is None else arguments.seq_lens.tolist()
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
