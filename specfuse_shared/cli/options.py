"""Options that commands share, and their defaults: those of the settings that they stand for."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from specfuse_shared.settings.config import EXITS, FEEDBACKS, PRESETS, SCORES
from specfuse_shared.settings.member_config import BACKENDS, DTYPES, QUANTIZATIONS, MemberConfig
from specfuse_shared.settings.sampling_params import SamplingParams

MEMBER: dict[str, Any] = {f.name: f.default for f in fields(MemberConfig)}
SAMPLING = SamplingParams()

QuestionArgument = Annotated[str, typer.Argument(metavar="QUESTION", help='What to ask; "-" reads standard input.')]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", metavar="N", help="The most tokens of an answer.")]
Temperature = Annotated[float, typer.Option("--temperature", metavar="T", help="0 is greedy decoding.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="S", help="Makes a sampled answer reproducible.")]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="A string that ends the answer; can be repeated.")
]
Preset = Annotated[str, typer.Option("--preset", metavar="NAME", help=" | ".join(PRESETS))]
SegmentTokens = Annotated[
    int | None, typer.Option("--segment-tokens", metavar="L", help="The most tokens that a member drafts in a round.")
]
Score = Annotated[str | None, typer.Option("--score", metavar="NAME", help=" | ".join(SCORES))]
Feedback = Annotated[str | None, typer.Option("--feedback", metavar="NAME", help=" | ".join(FEEDBACKS))]
Exit = Annotated[str | None, typer.Option("--exit", metavar="NAME", help=" | ".join(EXITS))]
Dtype = Annotated[str, typer.Option("--dtype", metavar="NAME", help=" | ".join(DTYPES))]
Quantization = Annotated[str | None, typer.Option("--quantization", metavar="NAME", help=" | ".join(QUANTIZATIONS))]
BackendOption = Annotated[str, typer.Option("--backend", metavar="NAME", help=" | ".join(BACKENDS))]
Planned = Annotated[bool, typer.Option("--plan", help="Show where the members would go, without loading them.")]
Devices = Annotated[
    str | None,
    typer.Option(
        "--devices", metavar="LIST", help='Plan for other hardware: "80GB", "4x24GB", "24GB,cpu:64GB"; GB is 10⁹ bytes.'
    ),
]
Answers = Annotated[int, typer.Option("--answers", metavar="B", help="Answers at once for which the plan makes room.")]
Context = Annotated[int, typer.Option("--context", metavar="C", help="Tokens of context per answer, in the plan.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Explain = Annotated[bool, typer.Option("--explain", help="Show every round after the answer.")]
Report = Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write an HTML report of the answer.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show members and library messages on stderr.")]
LibrariesVerbose = Annotated[bool, typer.Option("--verbose", help="Show messages of the libraries on stderr.")]
