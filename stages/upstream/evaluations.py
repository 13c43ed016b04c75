"""What is for evaluation and may never be trained on: by the words of its name, or as a known repository."""

import re
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from urllib.parse import urlsplit

# A word that says so by itself, and what is run together with it: testset, trainval, devtest, minival.
_JUDGING = (r"tests?|testing|valid|validation|vals?|devs?(?![ _-]?ops)|development|evals?|evaluations?|bench|"
            r"benchmarks?|benchmarking|(?:held|hold)[ _.-]?outs?")
_BESIDE = "train|mini|sets?|data|splits?"
_TELLING = re.compile(rf"(?<![a-z])(?:{_BESIDE})*(?:{_JUDGING})(?:{_BESIDE}|{_JUDGING})*(?![a-z])")
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_HUB = re.compile(r"(?:hf://|//(?:www\.)?huggingface\.co/|//hf\.co/)(?:datasets/|models/)?"
                  r"(?P<owner>[\w.-]+)/(?P<rest>.+)")

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
    found = _TELLING.search(_HUMP.sub(" ", name).lower())
    return found[0] if found else None


def measures(repository: str) -> bool:
    """Say whether a repository (OWNER/NAME) is a known evaluation set."""
    return any(fnmatchcase(repository.lower(), pattern) for pattern in REPOSITORIES)


def evaluation_at(uri: str) -> str | None:
    """Return what says of a URI that it is for evaluation, if anything does: a known repository, or a word.

    Of a hub's address all but the owner counts, of any other the last part: a host or a user may be called
    as they like.
    """
    hub = _HUB.search(uri)
    if hub is None:
        return telling_word(PurePosixPath(urlsplit(uri).path).name)
    repository = f"{hub['owner']}/{re.split('[@/]', hub['rest'])[0]}"
    return repository if measures(repository) else telling_word(hub["rest"])
