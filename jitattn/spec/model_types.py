"""What the code of models of one type does that their files need not say. Torch-free.

How a model pairs the elements it rotates was compared with transformers' own rotary module and the
function that its attention calls: frequencies, amplitude and rotated vectors
(``tests/tensors/test_rope_models.py``). docs/models.md is generated from the table.
"""

from __future__ import annotations

from collections.abc import Mapping

from jitattn.base.record import Value
from jitattn.spec.layout import Pairing


class Axes(Value):
    """Which of three positions turns each pair, where tokens have three.

    ``section`` is what files may leave out. ``is_interleaved`` says that sections take turns pair
    by pair. ``is_known`` False: no ``Rope`` has the model's order, and only the rotation of text,
    whose three positions are the same, is right.
    """

    section: tuple[int, int, int] | None
    is_interleaved: bool = False
    is_known: bool = True


class Attention(Value):
    """What was read of the attention of one type beside its rotation.

    ``bias`` is whether q, k and v have one, or the field that says so. ``windows`` says which
    layers have the window of ``sliding_window``: "all", "some", or "asked" for, with
    ``use_sliding_window``.
    """

    bias: bool | str = "attention_bias"
    use_norm: bool = False
    use_sinks: bool = False
    windows: str = "all"
    has_nope_layers: bool = False
    has_latents: bool = False


class ModelType(Value):
    """The models of one ``model_type``.

    ``attention`` None: only the rotation was verified. ``defaults`` are values of fields that files
    leave out.
    """

    pairing: Pairing
    axes: Axes | None = None
    attention: Attention | None = None
    defaults: Mapping[str, object] | None = None


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_NEOX = _words(
    """
    afmoe apertus apertus1p5 apertus1p5_text arcee aria aria_text audioflamingo3 bamba beam
    bitnet chameleon cohere_compass cohere_compass_text colmodernvbert colpali colqwen2
    cosmos3_edge cosmos3_edge_text cosmos3_omni csm csm_depth_decoder_model cwm dbrx
    deepseek_ocr2 deepseek_ocr2_text deepseek_vl deepseek_vl_hybrid dia dia_decoder diffllama
    diffusion_gemma diffusion_gemma_text doge dory dots1 embedding_gemma2 embedding_gemma2_text
    emu3 emu3_text_model esm esmc eurobert evolla exaone exaone4 exaone4_5 exaone_moe falcon
    falcon_h1 fast_vlm flex_olmo flint fun_asr_nano fuyu gemma gemma2 gemma3 gemma3_text gemma3n
    gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_assistant gemma4_unified_text
    glm4_moe glm4v_moe glm4v_moe_text glm_image glm_image_text glmasr got_ocr2 gpt_neox
    gpt_neox_japanese gpt_oss gradium_phonon_tts granite granite_docling granite_docling_text
    granite_speech granite_speech_plus granite_swa granitemoe granitemoe_swa granitemoehybrid
    granitemoeshared gte hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax
    hyperclovax_vision_v2 idefics idefics2 idefics3 internlm3 internvl iquestcoder jais2 janus
    jetmoe jev jina_embeddings_v3 kolibri1 kyutai_speech_to_text laguna lara_mini lfm2 lfm2_moe
    lfm2_vl lfm3 lfm3_vl lighton_ocr llama llava llava_next llava_next_video llava_onevision
    mellum mimo_v2_flash minicpm3 minicpm_ocr minicpmv4_6 minicpmv4_7 minimax minimax_m2
    minimax_m3_vl minimax_m3_vl_text ministral ministral3 mistral mistral3 mixtral mllama
    mllama_text_model modernbert modernbert-decoder modernvbert molmo2 molmo2_text moshi
    moss_transcribe_diarize muse_glimmer muse_glimmer_assistant muse_glimmer_text muse_spark
    muse_spark_text musicflamingo nemotron nemotron3_5_transcribe_word_timestamp neomme neucodec
    nomic_bert olmo olmo2 olmo3 olmo_hybrid olmoe omniasr ovis2 paddleocr_vl paddleocr_vl_text
    paligemma pe_audio pe_audio_video pe_video perception_lm persimmon phi phi3 phi4_multimodal
    phimoe pocket_tts pp_chart2table qianfan_ocr qwen2 qwen2_5_omni qwen2_5_omni_talker
    qwen2_5_omni_text qwen2_5_omni_thinker qwen2_5_vl qwen2_5_vl_text qwen2_audio qwen2_moe
    qwen2_vl qwen2_vl_text qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_asr
    qwen3_moe qwen3_next qwen3_omni_moe qwen3_omni_moe_talker_code_predictor
    qwen3_omni_moe_talker_text qwen3_omni_moe_text qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe
    qwen3_vl_moe_text qwen3_vl_text qwen4_exp qwen4_exp_text recurrent_gemma sarvam_moe seed_oss
    shieldgemma2 smollm3 smolvlm solar_open stablelm starcoder2 step3p5 step3p7 t5_gemma_module
    t5gemma t5gemma2 t5gemma2_decoder t5gemma2_encoder t5gemma2_text timesfm2_5 ultrabert
    ultravbert unlimited_ocr unlimited_ocr_text vaultgemma vibevoice vibevoice_asr video_llama_3
    video_llava vipllava voxtral voxtral_realtime voxtral_realtime_text xcodec2 zamba2 zaya
    """
)
_INTERLEAVED = _words(
    """
    axk1 axk2 aya_vision bailing_hybrid bailing_moe_v2_5 blt_global_transformer
    blt_local_decoder blt_patcher codegen cohere cohere2 cohere2_moe cohere2_vision deepseek_v2
    deepseek_v3 deepseek_v32 deepseek_v4 dots3_note dots3_note_text ernie4_5 ernie4_5_moe
    ernie4_5_vl_moe ernie4_5_vl_moe_text glm glm4 glm46v glm4_moe_lite glm4v glm4v_text
    glm_moe_dsa glm_ocr glm_ocr_text glmga gptj helium hy_v4_vl hy_v4_vl_text kimi_k2 kimi_k25
    llama4 llama4_text longcat_flash mistral4 mistral_large4 mistral_large4_text moonshine
    moonshine_streaming openai_privacy_filter sarvam_mla youtu
    """
)
_AXES = {
    **dict.fromkeys(
        (
            *("colqwen2", "paddleocr_vl", "paddleocr_vl_text", "qwen2_5_omni"),
            *("qwen2_5_omni_talker", "qwen2_5_omni_text", "qwen2_5_omni_thinker", "qwen2_5_vl"),
            *("qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text"),
        ),
        Axes(section=(16, 24, 24)),
    ),
    **dict.fromkeys(
        (
            *("glm46v", "glm4v", "glm4v_moe", "glm4v_moe_text", "glm4v_text", "glm_image"),
            *("glm_image_text", "glm_ocr", "glm_ocr_text", "glmga"),
        ),
        Axes(section=(8, 12, 12)),
    ),
    **dict.fromkeys(
        (
            *(
                "cohere_compass",
                "cohere_compass_text",
                "cosmos3_edge",
                "cosmos3_edge_text",
                "cosmos3_omni",
                "qwen3_omni_moe",
            ),
            *("qwen3_omni_moe_talker_text", "qwen3_omni_moe_text", "qwen3_omni_moe_thinker"),
            *("qwen3_vl", "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_vl_text"),
        ),
        Axes(section=(24, 20, 20), is_interleaved=True),
    ),
    **dict.fromkeys(
        (
            *("jev", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "qwen3_5", "qwen3_5_moe"),
            *("qwen3_5_moe_text", "qwen3_5_text", "qwen4_exp", "qwen4_exp_text"),
        ),
        Axes(section=(11, 11, 10), is_interleaved=True),
    ),
    **dict.fromkeys(("hy_v4_vl", "hy_v4_vl_text"), Axes(section=(12, 10, 10), is_interleaved=True)),
    **dict.fromkeys(
        ("ernie4_5_vl_moe", "ernie4_5_vl_moe_text"), Axes(section=None, is_known=False)
    ),
}

_ATTENTION: dict[str, Attention] = {
    **dict.fromkeys(
        ("llama", "mistral", "mixtral", "granite", "granitemoe", "gemma", "phi3", "phimoe", "glm4"),
        Attention(),
    ),
    **dict.fromkeys(
        ("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
        Attention(bias=True, windows="asked"),
    ),
    "qwen2_moe": Attention(bias="qkv_bias", windows="asked"),
    **dict.fromkeys(
        ("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text"),
        Attention(use_norm=True, windows="asked"),
    ),
    "gemma2": Attention(windows="some"),
    **dict.fromkeys(("gemma3", "gemma3_text"), Attention(use_norm=True, windows="some")),
    "gpt_oss": Attention(use_sinks=True, windows="some"),
    "phi": Attention(bias=True),
    "starcoder2": Attention(bias="use_bias"),
    "smollm3": Attention(windows="asked"),
    "cohere2": Attention(windows="some", has_nope_layers=True),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2"),
        Attention(has_latents=True),
    ),
}
_DEFAULTS: dict[str, dict[str, object]] = {
    "qwen2_moe": {"qkv_bias": True},
    "qwen3": {"head_dim": 128},
    "gemma": {"head_dim": 256},
    "gemma2": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    "gpt_oss": {"attention_bias": True, "head_dim": 64, "sliding_window": 128},
    "phi": {"partial_rotary_factor": 0.5},
    "starcoder2": {"use_bias": True},
    "glm4": {"partial_rotary_factor": 0.5},
}
MODEL_TYPES: Mapping[str, ModelType] = {
    name: ModelType(
        pairing=pairing,
        axes=_AXES.get(name),
        attention=_ATTENTION.get(name),
        defaults=_DEFAULTS.get(name),
    )
    for pairing, names in ((Pairing.NEOX, _NEOX), (Pairing.INTERLEAVED, _INTERLEAVED))
    for name in names
}
"""By ``model_type``."""

ROTATED_OTHERWISE: Mapping[str, str] = {
    **dict.fromkeys(("hunyuan_vl", "hunyuan_vl_text"), "gives tokens four positions"),
    "nanochat": "turns pairs by negative angles",
}
"""Model types whose rotation no ``Rope`` has."""

ROTARY_DIM_UNREAD = frozenset({"minimax_m3_vl", "minimax_m3_vl_text"})
"""Model types that turn whole heads where a file has ``rotary_dim`` and no factor."""
