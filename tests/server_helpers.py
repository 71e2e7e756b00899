"""A server on a scripted engine: in this process (fixture `serve`), or as one of its own (run as a script)."""

import asyncio
import contextlib
import dataclasses
import json
import sys
import time
from pathlib import Path

import grpc
import grpc.aio
import tokenizers

from specserve.models.hub import ModelError
from specserve.models.tokenizer import Tokenizer
from specserve.proto import specserve_pb2_grpc
from specserve.server.chat import ChatTemplate
from specserve.server.config import ListenOptions, ModelOptions, SchedulerOptions, ServerConfig
from specserve.server.engine.engine import EngineStats
from specserve.server.engine.errors import DrainingError
from specserve.server.engine.sequence import GenerationSummary, SequenceEvent, TokenOutput
from specserve.server.grpc_server import GrpcServer, run_server
from specserve.server.logs import configure_logging
from specserve.server.serving import ModelDescription, Serving

TEMPLATE = "<s>{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
TEXT = "Grüße 🤗 an alle, the end"
EOS = 2
DESCRIPTION = ModelDescription(
    model_id="fake",
    revision="main",
    model_type="llama",
    dtype="float32",
    device="cpu",
    attention_backend="torch",
    num_shard=1,
    vocab_size=320,
    eos_token_ids=(EOS, 400),
    max_input_tokens=64,
    max_total_tokens=96,
    max_batch_tokens=32,
    max_batch_size=4,
)
CONFIG = ServerConfig(
    ModelOptions("fake"),
    scheduler=SchedulerOptions(max_concurrent_requests=8),
    server=ListenOptions("127.0.0.1", 0, drain_timeout_s=5),
)


def make_tokenizer() -> Tokenizer:
    """In the manner of Llama 2: ▁ for spaces, byte fallback, BOS added; 260 entries of a vocabulary of 320."""
    specials = ["<unk>", "<s>", "</s>"]
    pieces = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"aehlnrt,", "▁t", "he", "▁the"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    d = tokenizers.decoders
    backend.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse()])
    backend.add_special_tokens(specials)
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(backend, vocab_size=320, bos_token_id=1, eos_token_ids=(EOS,), chat_template=TEMPLATE)


class FakeEngine:
    """Says TEXT to every prompt, two tokens an event, and then EOS."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = [*tokenizer.encode(TEXT, add_special_tokens=False), EOS]
        self.step_s = 0.0
        self.requests = []
        self.num_open = 0
        self.num_events = 0
        self.others = ((5, -3.0),)  # likely tokens beside each
        self.error: Exception | None = None  # instead of event number `fail_at`
        self.fail_at = 0
        self.hold_at: int | None = None  # at this event, wait for `resume`
        self.resume = asyncio.Event()
        self.is_stopped = False
        self._is_draining = False
        self._ended = asyncio.Event()

    async def start(self) -> None:
        self.dead: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    async def generate(self, request):
        if self._is_draining:
            raise DrainingError("draining")
        self.requests.append(request)
        self.num_open += 1
        try:
            async for event in self._events(request):
                self.num_events += 1
                yield event
        finally:
            self.num_open -= 1

    async def _events(self, request):
        num_tokens = 0
        for number in range(len(self.tokens)):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), self.step_s)
            if self._ended.is_set():
                raise DrainingError("outlived --drain-timeout")
            if self.error is not None and number == self.fail_at:
                raise self.error
            if number == self.hold_at:
                await self.resume.wait()
            outputs, text, piece = [], "", None
            for token_id in self.tokens[2 * number : 2 * number + 2]:
                piece = request.text_stream.push(token_id)
                outputs.append(TokenOutput(token_id, -0.5, 1, ((token_id, -0.5), *self.others), piece.token_text))
                text += piece.delta
                if piece.finish_reason:
                    break
            num_tokens += len(outputs)
            summary = None
            if piece.finish_reason:
                stop = (piece.stop_string, piece.stop_token_id)
                prompt_tokens = len(request.prompt_token_ids)
                times = (0.25, 0.5, 1.5)
                seed = request.sampling.seed
                summary = GenerationSummary(
                    piece.finish_reason, prompt_tokens, num_tokens, seed, *times, 8, 6, 4, (4, 2), 3, *stop
                )
            prompt = None
            if number == 0 and request.prompt_details:
                prompt = tuple(
                    TokenOutput(i, None if n == 0 else -1.0, None) for n, i in enumerate(request.prompt_token_ids)
                )
            yield SequenceEvent(0, tuple(outputs), text, num_tokens, prompt, summary)
            if summary is not None:
                return

    def stats(self) -> EngineStats:
        return EngineStats(4, 24, 24 - self.num_open, self.num_open, 0, 7, 70, 1, 10, 30, (9, 7, 4))

    async def drain(self, timeout_s: float) -> bool:
        self._is_draining = True
        end = time.monotonic() + timeout_s
        while self.num_open and time.monotonic() < end:
            await asyncio.sleep(0.01)
        is_idle = self.num_open == 0
        self._ended.set()
        return is_idle

    async def stop(self) -> None:
        self.is_stopped = True


def make_serving(**changes) -> Serving:
    tokenizer = make_tokenizer()
    description = dataclasses.replace(DESCRIPTION, **changes)
    return Serving(FakeEngine(tokenizer), tokenizer, ChatTemplate(TEMPLATE, {"bos_token": "<s>"}), description)


class Running:
    """A GrpcServer and what talks to it."""

    def __init__(self, server: GrpcServer, serving: Serving, channel: grpc.aio.Channel) -> None:
        self.server, self.serving, self.channel = server, serving, channel
        self.engine: FakeEngine = serving.engine
        self.stub = specserve_pb2_grpc.TextGenerationStub(channel)

    async def raw(self, method: str, data: bytes):
        """Send bytes as they are; the bytes of the answer."""
        return await self.channel.unary_unary(f"/specserve.v1.TextGeneration/{method}")(data, timeout=20)


@contextlib.asynccontextmanager
async def running(config: ServerConfig = CONFIG, *, is_open: bool = True, **changes):
    """A server on a free port of this machine."""
    server, serving = GrpcServer(config), make_serving(**changes)
    await server.start()
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(server.address.split(" and ")[0], options) as channel:
        try:
            await serving.engine.start()
            if is_open:
                await server.open(serving)
            yield Running(server, serving, channel)
        finally:
            await server.begin_shutdown()
            await server.stop()


def main() -> None:
    """Serve until a signal; the argument is JSON with what differs from the usual."""
    options = json.loads(sys.argv[1])

    def check(config: ServerConfig) -> None:
        if options.get("check_error"):
            raise ModelError("no such model: nowhere/at-all")

    def build(config: ServerConfig) -> Serving:
        time.sleep(options.get("load_s", 0))
        if options.get("build_error") == "model":
            raise ModelError("no such model: nowhere/nothing")
        if options.get("build_error"):
            raise RuntimeError("a bug")
        serving = make_serving()
        serving.engine.step_s = options.get("step_s", 0.0)
        return serving

    def on_ready(address: str, serving: Serving) -> None:
        print("ready", address, flush=True)
        if "die_after_s" in options:
            asyncio.get_running_loop().call_later(
                options["die_after_s"], serving.engine.dead.set_result, RuntimeError("broken step")
            )

    listen = ListenOptions(
        options.get("hostname", "127.0.0.1"),
        options.get("port", 0),
        Path(options["unix_socket"]) if "unix_socket" in options else None,
        drain_timeout_s=options.get("drain_timeout_s", 10),
    )
    config = dataclasses.replace(CONFIG, server=listen)
    configure_logging(config.log)
    sys.exit(run_server(config, check, build, on_ready))


if __name__ == "__main__":
    main()
