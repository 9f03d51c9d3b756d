"""Models of the server: random weights over bytes, or a checkpoint of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import jitattn
from docs.examples import serve
from docs.examples.serve import Batch, Step
from docs.examples.serving.text import ByteTokenizer, FolderTokenizer
from jitattn.kv import KVCacheManager, LayerConfig, PageIndexMode

_NAME = "jitattn_pages"
# Attention arguments that the planner reads from the module, or ignores; dropout
# is 0 in evaluation.
_SAID_ELSEWHERE = frozenset(
    {"dropout", "is_causal", "position_ids", "scaling", "sliding_window", "softcap", "use_cache"}
)


class RandomModel(serve.Model):
    """The model of ../serve.py over the tokens of `ByteTokenizer`, with random weights."""

    max_position = 1 << 14

    def __init__(self, windows: list[int]) -> None:
        super().__init__(windows, vocabulary=ByteTokenizer.vocabulary)

    def forward(self, manager: KVCacheManager, batch: Batch) -> Tensor:
        # Letters and spaces alone: random bytes are unreadable, and would end texts early.
        logits = super().forward(manager, batch).float()
        mask = torch.full_like(logits, -torch.inf)
        mask[:, [32, *range(97, 123)]] = 0
        return logits + mask


class Checkpoint:
    """A model of transformers whose attention writes and reads the manager's pages."""

    def __init__(self, folder: Path, device: str = serve.DEVICE) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.modeling_utils import AttentionInterface

        AttentionInterface.register(_NAME, _attend)
        _register_no_mask()
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation=_NAME, local_files_only=True
        )
        self._model.to(device).eval()
        config = self._model.config.get_text_config()
        self._layers = sorted(
            (m for m in self._model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling")),
            key=lambda module: module.layer_idx,
        )
        if [module.layer_idx for module in self._layers] != list(range(config.num_hidden_layers)):
            raise ValueError(f"a {type(self._model).__name__} has layers of another kind")
        self._config = config
        self.max_position = int(config.max_position_embeddings)
        self.device = device
        self.planners = self._make_planners()

    def _make_planners(self) -> dict[int, jitattn.AttentionPlanner]:
        config = self._config
        found: dict[int, jitattn.AttentionPlanner] = {}
        for module in self._layers:
            planner = jitattn.AttentionPlanner(
                num_qo_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_dim=module.head_dim,
                page_size=serve.PAGE_SIZE,
                window_left=_window(module),
                sm_scale=module.scaling,
                logits_soft_cap=getattr(config, "attn_logit_softcapping", None) or 0.0,
                use_sinks=getattr(module, "sinks", None) is not None,
                device=self.device,
            )
            known = found.setdefault(_window(module), planner)
            if known.config != planner.config:
                raise ValueError("layers of one window differ in heads or scales")
        return found

    def layers(self) -> list[LayerConfig]:
        return [
            LayerConfig(
                layer_id=module.layer_idx,
                num_kv_heads=self._config.num_key_value_heads,
                head_dim=module.head_dim,
                window_left=_window(module),
            )
            for module in self._layers
        ]

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        found = self._model.generation_config.eos_token_id
        if found is None:
            found = self._config.eos_token_id
        return frozenset([found] if isinstance(found, int) else found or [])

    def tokenizer(self, folder: Path) -> FolderTokenizer:
        return FolderTokenizer(folder, self.stop_ids, self._config.vocab_size)

    @torch.inference_mode()
    def forward(self, manager: KVCacheManager, batch: Batch) -> Tensor:
        """Compute the new tokens of each request; return logits of its next token."""
        step = Step.of(manager, self.planners, batch)
        tokens = [token for _, new in batch for token in new]
        places = [
            i
            for request, new in batch
            for i in range(request.seq.history_len, request.seq.history_len + len(new))
        ]
        logits = self._model(
            input_ids=torch.tensor([tokens], device=self.device),
            position_ids=torch.tensor([places], device=self.device),
            use_cache=False,
            logits_to_keep=step.indptr[1:].long() - 1,
            manager=manager,
            step=step,
        ).logits
        assert isinstance(logits, Tensor)
        return logits[0]


def _window(module: Any) -> int:
    window = getattr(module, "sliding_window", None)
    return -1 if window is None else int(window) - 1


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    manager: KVCacheManager,
    step: Step,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Write this step's K and V, and attend: tensors are [1, heads, num_tokens, head_dim]."""
    del attention_mask
    for name, said in others.items():
        if name not in _SAID_ELSEWHERE and said is not None and said is not False:
            raise ValueError(f"{type(module).__name__} gives {name}: it is not supported")
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    cache = manager.layer_view(module.layer_idx, PageIndexMode.PER_LAYER).kv_cache
    pages = step.tables[module.layer_idx]
    jitattn.append_kv(k, v, cache, pages=pages, seq_lens=step.seq_lens, qo_indptr=step.indptr)
    out = step.plans[_window(module)].run(q, cache, pages=pages, sinks=s_aux)
    assert isinstance(out, Tensor)
    return out[None], None


def _register_no_mask() -> None:
    from transformers.masking_utils import AttentionMaskInterface

    # Lengths imply the causal mask.
    AttentionMaskInterface.register(_NAME, lambda *arguments, **others: None)
