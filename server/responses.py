"""What the engine tells to response messages."""

from collections.abc import Iterable

from specserve.models.tokenizer import Tokenizer
from specserve.proto import specserve_pb2 as pb
from specserve.server.config import ServerConfig
from specserve.server.engine.engine import EngineStats
from specserve.server.engine.sequence import FinishReason, GenerationSummary, SequenceEvent, TokenOutput
from specserve.server.serving import Serving

_FINISH_REASONS = {
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.EOS_TOKEN: pb.FINISH_REASON_EOS_TOKEN,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
}


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Text of a token by itself; bytes that are no whole character become U+FFFD."""
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def event_message(event: SequenceEvent, tokenizer: Tokenizer, *, with_details: bool) -> pb.GenerateStreamResponse:
    """One event of a stream."""
    message = pb.GenerateStreamResponse(
        token_ids=[token.token_id for token in event.tokens],
        text=event.text,
        generated_tokens=event.generated_tokens,
    )
    if with_details:
        message.details.extend(_token_details(token, token.text, tokenizer) for token in event.tokens)
    if event.prompt is not None:
        message.prompt.extend(
            _token_details(token, token_text(tokenizer, token.token_id), tokenizer) for token in event.prompt
        )
    if event.summary is not None:
        message.summary.CopyFrom(_summary(event.summary))
    return message


def join_events(events: Iterable[pb.GenerateStreamResponse]) -> pb.GenerateResponse:
    """The answer of Generate: the events of the stream in one message."""
    response = pb.GenerateResponse()
    texts = []
    for event in events:
        response.token_ids.extend(event.token_ids)
        texts.append(event.text)
        response.details.extend(event.details)
        response.prompt.extend(event.prompt)
        if event.HasField("summary"):
            response.summary.CopyFrom(event.summary)
    response.text = "".join(texts)
    return response


def _token_details(token: TokenOutput, text: str, tokenizer: Tokenizer) -> pb.TokenDetails:
    return pb.TokenDetails(
        id=token.token_id,
        text=text,
        logprob=token.logprob,
        rank=token.rank,
        special=token.token_id in tokenizer.special_ids,
        top=[pb.TopToken(id=i, text=token_text(tokenizer, i), logprob=logprob) for i, logprob in token.top],
    )


def _summary(summary: GenerationSummary) -> pb.GenerationSummary:
    return pb.GenerationSummary(
        finish_reason=_FINISH_REASONS[summary.finish_reason],
        prompt_tokens=summary.prompt_tokens,
        generated_tokens=summary.generated_tokens,
        seed=summary.seed,
        queue_seconds=summary.queue_seconds,
        prefill_seconds=summary.prefill_seconds,
        decode_seconds=summary.decode_seconds,
        drafted_tokens=summary.drafted_tokens,
        accepted_tokens=summary.accepted_tokens,
        num_drafts=summary.num_drafts,
        accepted_per_position=summary.accepted_per_position,
        mean_acceptance_length=_mean_length(summary.accepted_tokens, summary.num_drafts),
        cached_prompt_tokens=summary.cached_prompt_tokens,
        stop_string=summary.stop_string,
        stop_token_id=summary.stop_token_id,
    )


def _mean_length(num_accepted: int, num_drafts: int) -> float | None:
    return 1 + num_accepted / num_drafts if num_drafts else None


def info_message(
    serving: Serving, config: ServerConfig, stats: EngineStats, *, version: str, uptime_seconds: float
) -> pb.InfoResponse:
    """The answer of Info."""
    model = serving.description
    return pb.InfoResponse(
        version=version,
        model_id=model.model_id,
        revision=model.revision,
        model_type=model.model_type,
        dtype=model.dtype,
        device=model.device,
        attention_backend=model.attention_backend,
        num_shard=model.num_shard,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        has_chat_template=serving.tokenizer.chat_template is not None,
        max_input_tokens=model.max_input_tokens,
        max_total_tokens=model.max_total_tokens,
        max_batch_tokens=model.max_batch_tokens,
        max_batch_size=model.max_batch_size,
        max_concurrent_requests=config.scheduler.max_concurrent_requests,
        max_stop_sequences=config.server.max_stop_sequences,
        max_top_n_tokens=config.server.max_top_n_tokens,
        block_size=stats.block_size,
        num_blocks=stats.num_blocks,
        free_blocks=stats.free_blocks,
        running_requests=stats.num_running,
        waiting_requests=stats.num_waiting,
        speculator=pb.SpeculatorInfo(
            type=model.speculator.type,
            id=model.speculator.id,
            num_speculative_tokens=model.speculator.num_speculative_tokens,
            num_parameters=model.speculator.num_parameters,
            usd_method=model.speculator.usd_method,
            drafted_tokens=stats.num_drafted_tokens,
            accepted_tokens=stats.num_accepted_tokens,
            num_drafts=stats.num_drafts,
            accepted_per_position=stats.accepted_per_position,
            mean_acceptance_length=_mean_length(stats.num_accepted_tokens, stats.num_drafts),
        ),
        finished_requests=stats.num_finished,
        generated_tokens=stats.num_generated_tokens,
        preemptions=stats.num_preemptions,
        uptime_seconds=uptime_seconds,
    )
