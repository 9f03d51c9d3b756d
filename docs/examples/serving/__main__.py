"""``python -m docs.examples.serving``: see ``--help``."""

from __future__ import annotations

import argparse
import logging
import signal
from pathlib import Path
from typing import Any

from docs.examples.serve import CHUNK, DEVICE, PAGE_SIZE
from docs.examples.serving.engine import Engine
from docs.examples.serving.models import Checkpoint, RandomModel
from docs.examples.serving.ranks import start_ranks
from docs.examples.serving.server import IDLE_S, MAX_CONNECTIONS, Server
from docs.examples.serving.text import ByteTokenizer, Tokenizer
from jitattn.kv import KVCacheConfig, KVCacheManager


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m docs.examples.serving", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="there is no authentication")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument(
        "--model", type=Path, help="folder of a transformers checkpoint; without: random weights"
    )
    parser.add_argument("--name", help="of the model, to clients; default: the folder's")
    parser.add_argument("--kv-bytes", type=int, default=1 << 26, help="of pages on the device")
    parser.add_argument("--host-bytes", type=int, default=0, help="of pages that sleep, likewise")
    parser.add_argument(
        "--typical-len", type=int, default=512, help="tokens of most requests: what layers get"
    )
    parser.add_argument(
        "--max-connections", type=int, default=MAX_CONNECTIONS, help="at a time; more get a 503"
    )
    parser.add_argument(
        "--context-parallel", type=int, default=1, metavar="N",
        help="processes, a card each, that share the tokens of each sequence; random weights alone",
    )  # fmt: skip
    parser.add_argument(
        "--idle-seconds", type=float, default=IDLE_S, help="in which a request has to arrive"
    )
    return parser


def make_server(options: argparse.Namespace) -> Server:
    """Load a model, and bind its port."""
    model: Any
    manager: Any = None
    tokenizer: Tokenizer
    if options.context_parallel != 1:
        if options.model is not None:
            raise OSError("--context-parallel serves random weights alone")
        model = manager = start_ranks(
            options.context_parallel, gpu_bytes=options.kv_bytes,
            host_bytes=options.host_bytes, typical_len=options.typical_len,
        )  # fmt: skip
        tokenizer, name = ByteTokenizer(), "random"
    elif options.model is None:
        model, tokenizer, name = RandomModel([-1, 31, -1]), ByteTokenizer(), "random"
    else:
        model = Checkpoint(options.model)
        tokenizer, name = model.tokenizer(options.model), options.model.resolve().name
    if manager is None:
        config = KVCacheConfig(
            page_size=PAGE_SIZE, gpu_bytes=options.kv_bytes, host_bytes=options.host_bytes,
            layers=model.layers(), typical_len=options.typical_len,
        )  # fmt: skip
        manager = KVCacheManager(config, device=DEVICE)
    engine = Engine(model, manager, chunk=getattr(model, "chunk", CHUNK))
    return Server(
        (options.host, options.port), engine, tokenizer, options.name or name,
        max_connections=options.max_connections, idle_s=options.idle_seconds,
    )  # fmt: skip


def main() -> None:
    options = parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server = make_server(options)
    except (OSError, ImportError) as error:
        raise SystemExit(
            f"can't serve {options.model or 'random weights'} on port {options.port}: {error}"
        ) from None
    host, port = server.server_address[:2]
    print(f"{server.model} at http://{host}:{port}/v1, up to {server.engine.max_len} tokens")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("closing")
    finally:
        server.server_close()
        server.engine.close()
        server.end_connections()
        server.engine.manager.close()


if __name__ == "__main__":
    main()
