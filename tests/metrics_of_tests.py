"""Metrics as engines write them, of a service with a known history; and a server for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@dataclass
class History:
    """What a service did since its start."""

    answers: float = 0
    rounds: float = 0
    """Without the passes that read prompts."""
    drafting: float = 0
    drafted: dict[int, float] = field(default_factory=dict)
    accepted: dict[int, float] = field(default_factory=dict)
    seconds: float = 0
    started: float = 1000.0

    def ran(self, rounds: int, k: int, at: list[float], answers: int = 0, plain: int = 0) -> History:
        """Rounds with drafts of k tokens, accepted at each position at these conditional rates; and plain rounds."""
        self.rounds += rounds + plain
        self.drafting += rounds
        self.answers += answers
        alive = float(rounds)
        for j in range(1, k + 1):
            self.drafted[j] = self.drafted.get(j, 0) + rounds
            alive = round(alive * at[min(j, len(at)) - 1])
            self.accepted[j] = self.accepted.get(j, 0) + alive
        self.seconds += 0.02 * (rounds + plain)
        return self

    @property
    def total_drafted(self) -> float:
        return sum(self.drafted.values())

    @property
    def total_accepted(self) -> float:
        return sum(self.accepted.values())

    @property
    def generated(self) -> float:
        """With the first token of each answer, which reading the prompt yields."""
        return self.answers + self.rounds + self.total_accepted


def vllm(h: History, model: str = "llama", speculation: bool = True) -> str:
    who = f'engine="0",model_name="{model}"'
    text = f"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{{who}}} 3.0
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{{who}}} {h.generated}
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{{who},le="+Inf"}} {h.answers}
vllm:time_to_first_token_seconds_count{{{who}}} {h.answers}
vllm:request_decode_time_seconds_sum{{{who}}} {h.seconds}
process_start_time_seconds {h.started}
"""
    if speculation:
        text += f"""vllm:spec_decode_num_drafts_total{{{who}}} {h.drafting}
vllm:spec_decode_num_drafts_created{{{who}}} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{{{who}}} {h.total_drafted}
vllm:spec_decode_num_accepted_tokens_total{{{who}}} {h.total_accepted}
"""
        for j, count in h.accepted.items():
            text += f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{who},position="{j - 1}"}} {count}\n'
    return text


def sglang(h: History, k: int = 4, counter: bool = True, old: bool = False) -> str:
    who = 'engine_type="unified",model_name="llama",tp_rank="0"'
    length = 1 + h.total_accepted / h.rounds if h.rounds else 0.0
    rate = h.total_accepted / (h.rounds * k) if h.rounds else 0.0
    words = "`accepted drafts / proposed drafts` in batch"
    if old:
        rate, words = length / (k + 1), "`accepted tokens / total draft tokens` in batch"
    text = f"""# HELP sglang:spec_accept_rate Speculative acceptance rate ({words}).
sglang:num_running_reqs{{{who}}} 1.0
sglang:spec_accept_length{{{who}}} {length}
sglang:spec_accept_rate{{{who}}} {rate}
sglang:generation_tokens_total{{engine_type="unified",model_name="llama"}} {h.generated}
sglang:num_requests_total{{engine_type="unified",model_name="llama"}} {h.answers}
"""
    if counter:
        text += f"""sglang:spec_num_steps{{{who}}} {k}
sglang:spec_num_draft_tokens{{{who}}} {k + 1}
sglang:spec_verify_calls_total{{engine_type="unified",model_name="llama"}} {h.rounds}
"""
    return text


def tensorrt_llm(h: History) -> str:
    who = 'model_name="llama",engine_type="trtllm"'
    text = f"""trtllm_request_success_total{{{who},finished_reason="stop"}} {h.answers}
trtllm_generation_tokens_total{{{who}}} {h.generated}
trtllm_num_requests_running{{{who}}} 2.0
trtllm_request_decode_time_seconds_sum{{{who}}} {h.seconds}
trtllm_speculative_config_info{{{who},draft_model="tiny"}} 1.0
trtllm_model_config_info{{{who},model="big"}} 1.0
"""
    for j in h.drafted:
        text += f'trtllm_spec_decode_drafted_tokens_total{{{who},token_position="{j - 1}"}} {h.drafted[j]}\n'
        text += f'trtllm_spec_decode_accepted_tokens_total{{{who},token_position="{j - 1}"}} {h.accepted[j]}\n'
    return text


def llama_cpp(h: History, counters: bool = True) -> str:
    text = f"""# HELP llamacpp:tokens_predicted_total Number of generation tokens processed.
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total {h.generated}
llamacpp:tokens_predicted_seconds_total {h.seconds}
llamacpp:n_decode_total {(h.rounds + h.answers) / 2}
llamacpp:n_busy_slots_per_decode 2
llamacpp:requests_processing 1
"""
    if counters:
        text += f"""llamacpp:spec_decode_num_draft_tokens_total {h.total_drafted}
llamacpp:spec_decode_num_accepted_tokens_total {h.total_accepted}
llamacpp:spec_decode_num_drafts_total {h.drafting}
"""
        for j, count in h.accepted.items():
            text += f'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="{j - 1}"}} {count}\n'
    return text


def slipstream(
    h: History,
    by: Mapping[str, tuple[float, float]] | None = None,
    target: str = "big",
    version: str = "1",
    trained_for: str = "",
) -> str:
    labels = f'version="0.1.0",target="{target}",target_version="{version}",draft="tiny",draft_version="7"'
    labels += f',draft_trained_for="{trained_for}"' if trained_for else ""
    plain = h.rounds - h.drafting
    text = f"""slipstream_info{{{labels}}} 1.0
slipstream_rounds_total {h.rounds + h.answers}
slipstream_drafts_total {h.drafting}
slipstream_running 2
slipstream_generated_tokens_total{{origin="accepted"}} {h.total_accepted}
slipstream_generated_tokens_total{{origin="bonus"}} {h.generated - h.total_accepted}
slipstream_time_to_first_token_seconds_count {h.answers}
slipstream_round_draft_tokens_bucket{{le="0.0"}} {plain}
slipstream_round_draft_tokens_bucket{{le="+Inf"}} {h.rounds}
slipstream_round_draft_tokens_count {h.rounds}
slipstream_answer_seconds_sum {h.seconds + 1}
slipstream_time_to_first_token_seconds_sum 1
"""
    usual = {"tiny": (h.total_drafted, h.total_accepted)} if h.drafting else {}
    for name, (drafted, accepted) in (by or usual).items():
        text += f'slipstream_draft_tokens_total{{drafter="{name}"}} {drafted}\n'
        text += f'slipstream_accepted_tokens_total{{drafter="{name}"}} {accepted}\n'
    for j in h.drafted:
        text += f'slipstream_draft_tokens_per_position_total{{position="{j}"}} {h.drafted[j]}\n'
        text += f'slipstream_accepted_tokens_per_position_total{{position="{j}"}} {h.accepted[j]}\n'
    return text


class Pages:
    """What a server answers, by path; what was posted to it."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.posted: list[tuple[str, str]] = []
        self.refuse = False
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def serve() -> Iterator[Pages]:
    """A server in this process."""
    pages = Pages()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(pages.answers.get(self.path))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            if not pages.refuse:
                pages.posted.append((self.path, body))
            self._reply(None if pages.refuse else "ok")

        def _reply(self, text: str | None) -> None:
            body = (text or "").encode()
            self.send_response(503 if text is None else 200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    pages.port = server.server_address[1]
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield pages
    finally:
        server.shutdown()
        server.server_close()
