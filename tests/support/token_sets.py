"""The kernels that the GPU tests of ``preprocess_qkv`` and ``append_kv`` launch, by cases."""

from __future__ import annotations

from dataclasses import replace

from tests.support.token_cases import CACHE_DTYPES, TABLES, TokenCase

_BASE = TokenCase()
_LATENT = replace(
    _BASE, head_dim=64, head_dim_vo=512, num_kv_heads=1, qkv="tuple", rotary="interleaved",
    rotary_dim=64, page_size=64,
)  # fmt: skip
# Powers of two and others, fragments of every kind in front, and every kind of cache behind.
_TRANSFORMED = {
    "bf16": _BASE,
    "e4m3": replace(_BASE, kv_dtype="float8_e4m3fn", scales="heads", q_out="float8_e4m3fn"),
    "nvfp4": replace(_BASE, kv_dtype="nvfp4", scales="heads", rotary_dim=64, use_norm=True),
    "int4": replace(_BASE, kv_dtype="int4", head_dim=96, rotary_dim=80, use_bias=True),
    "int4_g32": replace(_BASE, kv_dtype="int4_g32", head_dim=64, rotary="interleaved"),
    "plain": replace(_BASE, qkv="strided", memory="odd", rotary_dim=20, head_dim=80),
    "in place": replace(_BASE, q_out="in place", head_dim=240, page_table="slots"),
    "wide": replace(_BASE, head_dim=512, rotary_dim=64, rotary="interleaved", use_norm=True),
    "narrow": replace(_BASE, head_dim=16, rotary="none", dtype="float16", kv_dtype="float16"),
    "112": replace(_BASE, head_dim=112, page_table="csr", zero_tail=True, kv_dtype="nvfp4"),
}  # fmt: skip
KINDS: dict[str, TokenCase] = {
    "bf16": _BASE,
    "fp16": replace(_BASE, dtype="float16", kv_dtype="float16"),
    "e4m3": replace(_BASE, kv_dtype="float8_e4m3fn", scales="heads", q_out="float8_e4m3fn"),
    "e5m2": replace(_BASE, kv_dtype="float8_e5m2", scales="number", q_out="float8_e5m2"),
    "int8": replace(_BASE, kv_dtype="int8", scales="tensor"),
    "nvfp4": replace(_BASE, kv_dtype="nvfp4", scales="heads", rotary_dim=64, use_norm=True),
    "int4": replace(_BASE, kv_dtype="int4", scales="heads", rotary_dim=48, use_norm=True),
    "int4_g32": replace(_BASE, kv_dtype="int4_g32", head_dim=96, rotary_dim=80),
    "int4_g64": replace(_BASE, kv_dtype="int4_g64", rotary="interleaved", memory="HND"),
    "mrope": replace(_BASE, mrope=True, positions="given", rotary_dim=96, seed=1),
    "plain": replace(_BASE, qkv="strided", memory="odd", rotary_dim=20, head_dim=80),
    "interleaved": replace(
        _BASE, rotary="interleaved", rotary_dim=36, head_dim=48, use_bias=True, kv_dtype="int8"
    ),
    "partial": replace(_BASE, head_dim=256, rotary_dim=64, use_norm=True, page_size=64),
    "norm": replace(_BASE, head_dim=64, use_norm=True, use_bias=True, rotary="interleaved"),
    "separate": replace(_BASE, page_table="separate", memory="interleaved", use_norm=True),
    "csr": replace(_BASE, page_table="csr", kv_layout="HND", memory="HND", zero_tail=True),
    "token": replace(_BASE, page_table="token", rows=True, positions="delta"),
    "slots": replace(_BASE, page_table="slots", dtype="float16", kv_dtype="float8_e5m2"),
    "other 16 bits": replace(_BASE, dtype="float16", q_out="in place", rotary="none", page_size=3),
    "wide": replace(_BASE, head_dim=512, rotary_dim=64, page_size=1),
    "narrow": replace(_BASE, head_dim=16, page_size=8),
    # Of latent attention: K is the rope part, V the latent.
    "latent": replace(_LATENT, page_table="separate"),
    "latent e4m3": replace(_LATENT, kv_dtype="float8_e4m3fn", scales="number"),
    **{
        f"hadamard {name}": replace(case, qk_transform="hadamard", v_transform="hadamard")
        for name, case in _TRANSFORMED.items()
    },
    "hadamard of V": replace(_BASE, kv_dtype="int8", scales="heads", v_transform="hadamard"),
    "hadamard of K": replace(
        _LATENT, kv_dtype="float8_e4m3fn", scales="number", qk_transform="hadamard"
    ),
}
_APPEND = replace(_BASE, is_append=True)
APPENDS: dict[str, TokenCase] = {
    **{f"append {kv_dtype}": replace(_APPEND, kv_dtype=kv_dtype) for kv_dtype in CACHE_DTYPES},
    "append slots": replace(_APPEND, page_table="slots"),
    "append latent": replace(
        _APPEND, head_dim=512, head_dim_vo=64, num_kv_heads=1, page_table="slots", page_size=64
    ),
    "append fp16": replace(_APPEND, dtype="float16", kv_dtype="float8_e4m3fn", page_table="token"),
    "append int4 of 48": replace(_APPEND, kv_dtype="int4", head_dim=48, memory="odd"),
    "append nvfp4 of 48": replace(_APPEND, kv_dtype="nvfp4", head_dim=48, memory="odd"),
}


def kinds_of() -> list[str]:
    """Return what ``jitattn precompile --config`` takes, for every kernel of the GPU tests."""
    cases = [*KINDS.values(), *APPENDS.values()]
    # Every table, every cache, and q in its own type or in FP8, of the kernel of most tests.
    cases += [replace(_BASE, page_table=table) for table in TABLES]
    cases += [replace(_BASE, kv_dtype=kv_dtype) for kv_dtype in CACHE_DTYPES]
    cases += [replace(KINDS["e4m3"], kv_dtype=kv_dtype) for kv_dtype in CACHE_DTYPES]
    cases += [replace(KINDS["hadamard e4m3"], kv_dtype=kv_dtype) for kv_dtype in CACHE_DTYPES]
    cases += [replace(KINDS["e4m3"], kv_dtype="bfloat16", q_out="new")]
    # Written, and gathered.
    cases += [replace(_APPEND, kv_dtype=name, page_table="slots") for name in ("int4", "int4_g32")]
    # Angles, and pools of 16-token pages.
    cases += [replace(_BASE, dtype="float16", kv_dtype="float16", page_table="slots")]
    return list(dict.fromkeys(config_text(case) for case in cases))


def config_text(case: TokenCase) -> str:
    """Return a case's kernels as ``jitattn precompile --config`` takes them."""
    computes = not case.is_append
    fields: dict[str, object] = {
        "head_dim": case.head_dim,
        "head_dim_vo": case.head_dim_vo,
        "page_size": case.page_size,
        "qkv_dtype": case.dtype,
        "out_dtype": case.q_out if computes and case.q_out.startswith("float8") else None,
        "kv_dtype": case.kv_dtype,
        "page_table": case.page_table,
        "pairing": case.rotary if computes else "none",
        "use_mrope": computes and case.mrope,
        "use_bias": computes and case.use_bias,
        "use_norm": computes and case.use_norm,
        "use_qk_hadamard": computes and case.qk_transform is not None,
        "use_v_hadamard": computes and case.v_transform is not None,
    }
    texts = (f"{name}={str(value).lower()}" for name, value in fields.items() if value is not None)
    return ",".join(("kernel=preprocess", *texts))
