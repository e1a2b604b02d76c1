"""How a rule-based forecaster writes its report: the tags of the prompts, nothing else."""

import json
from collections.abc import Mapping, Sequence

from rollout.model import SampleRequest
from rollout.notebook import LedgerEntry


def uniform(options: Sequence[str]) -> dict[str, float]:
    """Equal probabilities, four decimals."""
    return {option: round(1 / len(options), 4) for option in options}


def report(request: SampleRequest, intro: str, answer: str, evidence: Sequence[LedgerEntry] = ()) -> str:
    """The final text. `answer` is the JSON object of probabilities, copied as it is into the answer and, in memory-on,
    into the notebook, which stands before the answer and holds the evidence."""
    parts = [intro]
    if request.mode == "memory-on":
        entries = ", ".join(_entry(e) for e in evidence)
        notebook = f'{{"assessment": {{"p": {answer}}}, "evidence_ledger": [{entries}]}}'
        parts.append(f"<belief_notebook>{notebook}</belief_notebook>")
    parts.append(f"<answer>{answer}</answer>")
    return "\n".join(parts)


def as_json(probabilities: Mapping[str, float]) -> str:
    """Probabilities as the JSON object of an answer."""
    return json.dumps(probabilities, ensure_ascii=False)


def _entry(entry: LedgerEntry) -> str:
    fields = entry.model_dump(mode="json", exclude_defaults=True) | {"supports": list(entry.supports)}
    fields["rules_out"], fields["status"] = list(entry.rules_out), entry.status
    return json.dumps(fields, ensure_ascii=False)
