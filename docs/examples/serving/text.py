"""Tokenizers, of bytes or of a checkpoint, and incremental detokenisation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

_UNFINISHED = "\ufffd"


class Tokenizer(Protocol):
    """Interface of a tokenizer; ``stop_ids`` end an answer."""

    stop_ids: frozenset[int]
    vocabulary: int

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the prompt of a conversation. ValueError: there is no way to write it."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteTokenizer:
    """A token is a byte of UTF-8; two more begin a text and end an answer."""

    BEGIN, END = 256, 257
    vocabulary = 258
    stop_ids = frozenset({END})

    def encode(self, text: str) -> list[int]:
        return [self.BEGIN, *text.encode()]

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        turns = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join([*turns, "assistant: "]))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class FolderTokenizer:
    """The tokenizer of a folder in the format of transformers."""

    def __init__(self, folder: Path, stop_ids: frozenset[int], vocabulary: int) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        own = self._tokenizer.eos_token_id
        self.stop_ids = stop_ids | ({own} if own is not None else set())
        self.vocabulary = vocabulary

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise ValueError("the model's tokenizer has no chat template")
        found = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return list(found["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


class GrowingText:
    """Incremental text of an answer, cut where a stop string begins.

    Pieces that were returned are never taken back: what may still change, the bytes of an
    unfinished character, or be cut, the beginning of a stop string, is held back.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._tokens: list[int] = []
        self._said = 0
        self.is_stopped = False

    def push(self, token: int) -> str:
        """Return the new text after one more token."""
        self._tokens.append(token)
        text = self._cut(self._tokenizer.decode(self._tokens))
        safe = text if self.is_stopped else text[: len(text) - self._num_uncertain(text)]
        return self._say(safe)

    def finish(self) -> str:
        """Return the withheld text."""
        return self._say(self._cut(self._tokenizer.decode(self._tokens)))

    def _say(self, text: str) -> str:
        piece = text[self._said :]
        self._said += len(piece)
        return piece

    def _cut(self, text: str) -> str:
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        self.is_stopped = bool(places)
        return text[: min(places)] if places else text

    def _num_uncertain(self, text: str) -> int:
        whole = text.rstrip(_UNFINISHED)
        held = max(
            (n for stop in self._stops for n in range(1, len(stop)) if whole.endswith(stop[:n])),
            default=0,
        )
        longer = max(
            (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
            default=0,
        )
        return max(len(text) - len(whole) + held, longer)
