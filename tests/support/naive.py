"""A plain implementation of the method: no cache, no batching, no tree. The engine must equal this in float32.

Every draft token and every score is one plain forward pass over the whole sequence, with eager attention. Formulas are
repeated here; text and ids (templates, canonical encoding, cuts, seeds) have the engine's forms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specfuse_shared import EnsembleConfig, Message, SamplingParams
from specfuse_shared.fusion.repetition import is_stuck, repeats
from specfuse_shared.members.local.member import InProcessMember
from specfuse_shared.runtime.sampler import Sampler
from specfuse_shared.text.chat_template import PLAIN_TURN_ENDS
from specfuse_shared.text.codec import cut_candidate, whole_characters
from specfuse_shared.text.stops import partial_stop
from specfuse_shared.types import MemberAbsence


@dataclass
class NaiveRound:
    candidates: dict[str, tuple[str, bool]]
    scores: dict[str, dict[str, float]]
    winner: str
    segment: str
    ended: bool
    active: list[str]


class NaiveMember:
    def __init__(self, member: InProcessMember, messages: list[Message], params: SamplingParams) -> None:
        self.name, self.codec, self.stop_ids = member.name, member.codec, list(member.stop_ids)
        self.m: Any = member
        self.prompt = member.encode_prompt(messages)
        self.sampler = Sampler(params, params.seed or 0, member.name, member.runner.device)
        ends = PLAIN_TURN_ENDS if member.prompts.kind == "plain" else ()
        self.turn_ends = () if params.ignore_eos else ends
        self.banned = member.banned_token_ids
        if params.ignore_eos:
            self.banned = torch.cat([self.banned, self.banned.new_tensor(self.stop_ids)])

    def logits(self, answer_ids: list[int]) -> torch.Tensor:
        """(tokens of the answer + 1, V): the logits after the prompt and after each answer token."""
        inputs = {"input_ids": torch.tensor([self.prompt + answer_ids]).to(self.m.runner.device), "use_cache": False}
        logits: torch.Tensor = self.m.runner.model(**inputs, **self.m.runner.keep_last(len(answer_ids) + 1)).logits
        return logits[0, -len(answer_ids) - 1 :].float()

    def draft(self, answer: str, limit: int, round_index: int) -> tuple[str, bool]:
        start, text = self.codec.encode(answer), ""
        ids: list[int] = []
        self.sampler.start(round_index)
        while len(ids) < limit or (not whole_characters(text) and len(ids) < limit + 8):
            logits = self.logits(start + ids)[-1].index_fill(0, self.banned, float("-inf"))
            token = self.sampler.pick(logits, self.prompt + start + ids)
            if token in self.stop_ids:
                return whole_characters(self.cut_turn(text)), True
            ids.append(token)
            text = self.codec.text_after(start, ids)
        if self.cut_turn(text) != text:
            return whole_characters(self.cut_turn(text)), True
        open_turn = partial_stop(text, self.turn_ends)
        return cut_candidate(text[: len(text) - open_turn] if 0 < open_turn < len(text) else text), False

    def cut_turn(self, text: str) -> str:
        at = [text.find(end) for end in self.turn_ends if end in text]
        return text[: min(at)].rstrip("\n") if at else text

    def judge(self, answer: str, candidate: str, ends: bool) -> list[tuple[float, int]]:
        """log p and bytes of the candidate's canonical tokens (and of any end of turn)."""
        ids = self.codec.encode(answer + candidate)
        before = self.codec.encode(answer)
        start = next(n for n in range(len(before), -1, -1) if ids[:n] == before[:n])
        logp = self.logits(ids).log_softmax(-1)
        results = [(float(logp[i, ids[i]]), self.codec.token_bytes([ids[i]])[0]) for i in range(start, len(ids))]
        return results + ([(float(logp[len(ids), self.stop_ids].logsumexp(0)), 1)] if ends else [])


Draft = tuple[str, bool]
Judged = dict[Draft, list[tuple[float, int]]]


def _scores(judged: Judged, config: EnsembleConfig) -> dict[Draft, float]:
    """One verifier's score of each candidate: exp(Σ log p / units), or the probability of the stretch."""
    if config.score == "stretch":
        return _stretch(judged, config.units == "token")
    units = {"text": lambda n: 1, "root": math.sqrt, "token": lambda n: n}[config.units or ""]
    return {d: math.exp(sum(lp for lp, _ in tokens) / units(len(tokens))) for d, tokens in judged.items()}


def _stretch(judged: Judged, whole: bool) -> dict[Draft, float]:
    """The probability up to the last point at which all candidates have text; finished answers count in full. The
    continuation of a candidate that ends counts only up to that end."""
    size = {d: len(d[0].encode()) for d in judged}
    border = (max if all(ends for _, ends in judged) else min)(size.values())
    results = {}
    for draft, tokens in judged.items():
        after = [e for e in judged if e[1] and e != draft and draft[0].startswith(e[0])]
        reach = min([border, *(size[e] for e in after)])
        at = min(0, size[draft] - sum(b for _, b in tokens[: len(tokens) - draft[1]]))
        score = 1.0
        for logp, count in tokens[: len(tokens) - draft[1]]:
            if at < reach:
                score *= math.exp(logp) if whole else math.exp(logp) ** min(1, (reach - at) / count)
                at += count
        if draft[1] and size[draft] <= reach:
            score *= math.exp(tokens[-1][0])
        elif at == reach and (over := [e for e in after if size[e] == reach]):
            score *= 1 - math.exp(judged[over[0]][-1][0])
        results[draft] = score
    return results


@torch.inference_mode()
def naive_rounds(
    config: EnsembleConfig,
    members: Sequence[InProcessMember],
    messages: list[Message],
    params: SamplingParams,
    kind: type[NaiveMember] = NaiveMember,
    absences: Sequence[Sequence[MemberAbsence]] = (),
) -> Iterator[NaiveRound]:
    """`absences`: for each round its late members, and the round since which they are late."""
    active = [kind(m, messages, params) for m in members]
    power = 1.5 if config.first_weights == "size" else 0
    first = {m.name: m.info.weight * m.info.report.parameters**power for m in members}
    weight = {name: share / sum(first.values()) for name, share in first.items()}
    quality = dict.fromkeys(weight, 0.0)
    answer, index, verified, opening = "", 0, 0, True
    while len(active) > 1:
        index += 1
        minimum = (config.first_segment_tokens or 0) - len(members[0].codec.encode(answer)) if opening else 0
        limit = max(minimum, config.segment_tokens)
        count = config.segment_tokens if config.early_margin else limit
        late = {a.member: a for a in (absences[index - 1] if index <= len(absences) else ())}
        while True:
            here = [m for m in active if m.name not in late or late[m.name].tokens > min(count, limit)]
            drafts = {m.name: m.draft(answer, min(count, limit), index) for m in here}
            distinct = list(dict.fromkeys(d for d in drafts.values() if d[0] or d[1]))
            judged = {m.name: {d: m.judge(answer, *d) for d in distinct} for m in here if len(distinct) > 1}
            mass = sum(weight[m.name] for m in here)
            own_weight = {m.name: weight[m.name] / mass for m in here}
            authors = {d: [name for name, draft in drafts.items() if draft == d] for d in distinct}
            circling = {d for d in distinct if config.repetition_guard and judged and repeats(answer, d[0])}
            is_last = count >= limit or (bool(distinct) and all(ends for _, ends in distinct))
            if is_last or len(distinct) == len(set(drafts.values())) == 1:
                opening = opening and not is_last
                break
            if judged:
                best, _, votes = _elect(judged, own_weight, authors, circling, config)
                over = any(ends for _, ends in distinct)
                margin = 4 * config.early_margin if over else config.early_margin
                if votes[best] > 0 and all(votes[best] >= margin * vote for d, vote in votes.items() if d != best):
                    break
            count *= 2
        (text, ended), table, total = _elect(judged, own_weight, authors, circling, config)
        scores = {name: {f"{t}|{e}": s for (t, e), s in row.items()} for name, row in table.items()}
        winner = next(name for name, d in drafts.items() if d == (text, ended))
        text, ended = ("", True) if config.repetition_guard and is_stuck(answer, text) else (text, ended)
        yield NaiveRound(drafts, scores, winner, text, ended, [m.name for m in here])
        answer += text
        if ended:
            return
        if not scores:
            continue
        verified += 1
        names = [m.name for m in here]
        draft_of = {i: f"{drafts[i][0]}|{drafts[i][1]}" for i in names}
        if config.feedback == "constant":
            grown = _feedback(config.feedback_rate, own_weight, names, scores, draft_of)
            weight = weight | {i: mass * w for i, w in grown.items()}
        if config.feedback_limit:
            gain = {m.name: weight[m.name] / first[m.name] for m in active}
            weight = {i: max(weight[i], first[i] * max(gain.values()) / config.feedback_limit) for i in gain}
            weight = {i: w / sum(weight.values()) for i, w in weight.items()}
        gained = {i: total.get(drafts[i], 0.0) for i in names}
        for m in active:
            quality[m.name] += gained.get(m.name, sum(gained.values()) / len(gained))
        if config.exit == "entropy":
            gone = _leavers({i: quality[i] for i in names}, verified, config)
            active = [m for m in active if m.name not in gone]
            mass = sum(weight[m.name] for m in active)
            weight = {m.name: weight[m.name] / mass for m in active}


def _elect(
    judged: dict[str, Judged],
    weight: dict[str, float],
    authors: dict[Draft, list[str]],
    circling: set[Draft],
    config: EnsembleConfig,
) -> tuple[Draft, dict[str, dict[Draft, float]], dict[Draft, float]]:
    """The winner, each verifier's scores, the votes. The lowest leaves, and the others are compared anew."""
    scores, total = _votes(list(authors), judged, weight, authors, config)
    gone = _outsiders(scores, weight, authors) if config.aggregate == "seconded_mean" and len(judged) > 2 else set()
    if gone and gone != set(judged):
        rest = {d: [j for j in names if j not in gone] for d, names in authors.items() if set(names) - gone}
        received = {j: {d: row[d] for d in rest} for j, row in judged.items() if j not in gone}
        winner, _, total = _elect(received, weight, rest, circling & set(rest), config)
        return winner, scores, {d: total.get(d, 0.0) / sum(weight[j] for j in received) for d in authors}
    threshold = max(total.values()) / 1000 if circling and len(judged) > 2 else 0.0
    remaining = [d for d in authors if d not in circling and total[d] >= threshold] or list(authors)
    while len(remaining) > 1:
        remaining.remove(_last(remaining, judged, weight, authors, config))
    return remaining[0], scores, total | dict.fromkeys(circling, 0.0)


def _outsiders(
    scores: dict[str, dict[Draft, float]], weight: dict[str, float], authors: dict[Draft, list[str]]
) -> set[str]:
    """Members that find only their own drafts plausible, if no other member finds these plausible. Plausible means at
    least a thousandth of the highest probability. A member with more than half of the votes is no outsider."""
    liked = {(j, d) for j, row in scores.items() for d in row if 1000 * row[d] >= max(row.values())}
    met = {(j, d) for j, d in liked if authors[d] != [j]}
    if not met:
        return set()
    heavy = {j for j in scores if weight[j] > 0.5 * sum(weight[k] for k in scores)}
    return (
        set(scores)
        - heavy
        - {j for j, _ in met}
        - {author for _, d in met for author in authors[d] if len(authors[d]) == 1}
    )


def _votes(
    drafts: list[Draft],
    judged: dict[str, Judged],
    weight: dict[str, float],
    authors: dict[Draft, list[str]],
    config: EnsembleConfig,
) -> tuple[dict[str, dict[Draft, float]], dict[Draft, float]]:
    scores = {name: _scores({d: row[d] for d in drafts}, config) for name, row in judged.items()}
    return scores, {d: _vote([(s[d], weight[j], authors[d] == [j]) for j, s in scores.items()], config) for d in drafts}


def _last(
    drafts: list[Draft],
    judged: dict[str, Judged],
    weight: dict[str, float],
    authors: dict[Draft, list[str]],
    config: EnsembleConfig,
) -> Draft:
    """The candidate that is removed. Indistinguishable candidates are compared without the others. If they share a
    beginning, it is removed if a tail after it has half of the votes per token; otherwise the tail with the fewest."""
    scores, total = _votes(drafts, judged, weight, authors, config)
    lowest = min(reversed(drafts), key=lambda d: total[d])
    rows = [*scores.values(), total]
    same = [d for d in drafts if all(math.isclose(r[d], r[lowest], rel_tol=1e-4) for r in rows)]
    if 1 < len(same) < len(drafts):
        return _last(same, judged, weight, authors, config)
    shortest = min(same, key=lambda d: (len(d[0].encode()), d[1]))
    tails = {d: 0.0 for d in same if d[0].startswith(shortest[0]) and d[0] != shortest[0] and not shortest[1]}
    mass = sum(weight[j] for j in judged)
    for d in tails:
        for name, row in judged.items():
            after, budget = [], len(d[0].encode()) - len(shortest[0].encode()) + d[1]
            for logp, size in reversed(row[d]):
                after += [logp] if size <= budget else []
                budget -= size
            tails[d] += weight[name] / mass * math.exp(sum(after) / max(1, len(after)))
    return (shortest if max(tails.values()) >= 0.5 else min(tails, key=lambda d: tails[d])) if tails else lowest


def _vote(votes: list[tuple[float, float, bool]], config: EnsembleConfig) -> float:
    """Weighted mean of (score, weight, whether it is the only author's). Seconded, with three or more members: the only
    author's score is at most a thousand times the best other one, unless it has more than half of the votes."""
    if config.aggregate == "seconded_mean" and len(votes) > 2:
        cap = 1000 * max(s for s, _, is_own in votes if not is_own)
        half = 0.5 * sum(w for _, w, _ in votes)
        votes = [(min(s, cap) if is_own and w <= half else s, w, is_own) for s, w, is_own in votes]
    return sum(s * w for s, w, _ in votes)


def _feedback(
    rate: float,
    weight: dict[str, float],
    names: list[str],
    scores: dict[str, dict[str, float]],
    draft_of: dict[str, str],
) -> dict[str, float]:
    grown = {}
    for i in names:
        votes = []
        for k in (k for k in names if k != i):
            duel = {
                j: (scores[j].get(draft_of[i], 0.0), scores[j].get(draft_of[k], 0.0)) for j in names if j not in (i, k)
            }
            third = [d for j, d in duel.items() if 1000 * max(d) >= max(scores[j].get(draft_of[x], 0.0) for x in names)]
            rival = (scores[k].get(draft_of[i], 0.0), scores[k].get(draft_of[k], 0.0))
            votes += [(mine > theirs) + 0.5 * (mine == theirs) for mine, theirs in third or [rival]]
        grown[i] = weight[i] * math.exp(rate * sum(votes) / len(votes))
    return {i: w / sum(grown.values()) for i, w in grown.items()}


def _leavers(quality: dict[str, float], t: int, config: EnsembleConfig) -> list[str]:
    share = [q / sum(quality.values()) for q in quality.values()]
    heat = -sum(s * math.log(s) for s in share if s) / math.log(len(share)) / math.sqrt(t)
    grown = {i: math.exp(len(share) * (s - max(share)) / heat) for i, s in zip(quality, share, strict=True)}
    keep = {i: g / sum(grown.values()) for i, g in grown.items()}
    best = sorted(keep, key=lambda i: -quality[i])[: config.min_active]
    return [i for i, p in keep.items() if p < config.exit_threshold / len(keep) and i not in best]
