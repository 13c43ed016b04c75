"""What is for evaluation and may never be trained on: by the words of its name, or as a known repository."""

import re
from fnmatch import fnmatchcase

WORDS = frozenset((
    "test", "tests", "testing", "valid", "validation", "val", "dev", "development", "eval", "evals",
    "evaluation", "benchmark", "benchmarks", "bench", "heldout", "holdout",
))

# Repositories that exist to measure models, whatever their splits are called; lower case, with wildcards.
REPOSITORIES = (
    "cais/mmlu", "hendrycks/*", "*/mmlu-pro*", "*/mmmlu*", "*/mmlu_*", "idavidrein/gpqa*", "*/gpqa*",
    "openai/openai_humaneval", "*/humaneval*", "evalplus/*", "*/mbpp*", "bigcode/bigcodebench*",
    "livecodebench/*", "princeton-nlp/swe-bench*", "swe-bench/*", "*/math-500*", "*/math500*", "*/aime*",
    "*/mt_bench*", "*/mt-bench*", "lmsys/mt_bench_human_judgments", "tatsu-lab/alpaca_eval*",
    "lmarena-ai/arena-hard*", "lmsys/arena-hard*", "allenai/wildbench*", "google/ifeval*", "*/ifeval*",
    "truthfulqa/*", "*/truthful_qa*", "lukaemon/bbh", "maveriq/bigbenchhard", "*/bbh*", "google/simpleqa*",
    "*/simpleqa*", "*/spec-bench*", "*/spec_bench*", "facebook/flores*", "*/xstorycloze*",
)


def telling_word(name: str) -> str | None:
    """Return the word by which a split, file or configuration says that it is for evaluation, if one does."""
    return next((word for word in re.findall(r"[a-z]+", name.lower()) if word in WORDS), None)


def measures(repository: str) -> bool:
    """Say whether a repository (OWNER/NAME) is a known evaluation set."""
    return any(fnmatchcase(repository.lower(), pattern) for pattern in REPOSITORIES)
