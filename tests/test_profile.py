"""Profiles: every kind of mistake is a sentence with file, key and what is allowed, before any work."""

from pathlib import Path

import pytest
from workshop import Workshop

from stages.profile import load_profile

ROOT = Path(__file__).resolve().parent.parent
PROFILES = sorted(path.stem for path in (ROOT / "profiles").glob("*.toml") if path.stem != "base")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("profiles") / "house")


@pytest.mark.parametrize(("text", "key", "allowed"), [
    ("[distill]\nlearning_rat = 1e-3", "distill.learning_rat", "learning_rate"),
    ("[distil]\nsteps = 1", "distil", "distill"),
    ("[fetch]\nsources = ['smollm2-135m-instruct', 'nowhere']", "fetch.sources", "smollm2-135m-instruct"),
    ("[[data.sources]]\nid = 'a'\nkind = 'hub'\nrows = 1", "data.sources.0", "need source"),
    ("[[data.sources]]\nid = 'a'\nkind = 'hub'\nsource = 'gsm8k'\nrows = 1", "profile", "must name gsm8k"),
    ("[distill]\nsteps = 'many'", "distill.steps", "integer (found 'many')"),
    ("[distill]\nsteps = -1", "distill.steps", "greater than or equal to 0 (found -1)"),
    ("[distill]\nsteps = 1.5", "distill.steps", "integer"),
    ("[distill]\nsteps = true", "distill.steps", "integer"),
    ("[distill]\nlearning_rate = 0.0", "distill.learning_rate", "greater than 0"),
    ("[distill]\nsteps = 5", "distill", "warmup_steps (10) must be below steps (5)"),
    ("[distill]\ndtype = 'float16'", "distill.dtype", "'float32' or 'bfloat16'"),
    ("[qat]\ngroup = 33", "qat.group", "32, 64 or 128"),
    ("[limits]\nlimit_bytes = 1000", "limits", "must be below limit_bytes (1000)"),
    ("[start]\nlayers = [3, 1]", "start", "rising order"),
    ("[start]\nlayers = [-1]", "start.layers.0", "greater than or equal to 0"),
    ("[teacher]\ncontext_tokens = 100", "profile", "teacher.context_tokens must hold"),
    ("[teacher]\ntop_k = nan", "teacher.top_k", "integer"),
    ("[teacher]\nengine = 'openai'", "profile", "'openai' needs servers.addresses, and only it takes them"),
    ("[servers]\naddresses = ['http://gpu:8000']", "profile", "'openai' needs servers.addresses, and only"),
    ("[servers]\naddresses = ['http://me:pw@gpu:8000']", "servers.addresses.0", "match pattern"),
    ("[servers]\naddresses = ['http://gpu:8000/v1']", "servers.addresses.0", "match pattern"),
    ("[servers]\naddresses = ['http://gpu:80', 'http://gpu:80']", "servers", "names a server twice"),
    ("[servers]\naddresses = ['http://gpu:99999']", "servers.addresses.0", "range 0-65535 (found 'http"),
    ("[servers]\naddresses = ['http://gpu:0']", "servers.addresses.0", "Port out of range 1-65535"),
    ("[servers]\naddresses = ['http://[::::]:80']", "servers.addresses.0", "appear to be an IPv4 or IPv6"),
    ("[fetch]\nsources = ['other']", "profile", "fetch.sources must name smollm2-135m-instruct"),
    ("device = 'tpu'", "device", "'cpu' or 'cuda'"),
    ("seed = 18446744073709551616.0", "seed", "integer"),
    ("seed = 20240101123000", "seed", "less than 4294967296"),
    ("[qat]\nclip_norm = inf", "qat.clip_norm", "finite number"),
    ("[selfcheck]\nbudget_s = inf", "selfcheck.budget_s", "finite number"),
    ("[checkpoints]\nminutes = inf", "checkpoints.minutes", "finite number"),
    ("[checkpoints]\nfolder = '~no-such-user/x'", "checkpoints.folder", "no such home folder"),
    ("[data]\ndecontaminate = ['/etc/hosts']", "data.decontaminate.0", "must be a plain relative path"),
    ("[data]\ndecontaminate = ['']", "data.decontaminate.0", "must be a plain relative path"),
    ("[target]\nrevision = 'main'", "target.revision", "to: sha256:b179c9523d0e6a0f98a330c7562b682750a6f8c"),
    ("[[data.sources]]\nid = 'x'\nkind = 'web'\nrows = 1", "data.sources.0.kind", "'jsonl' or 'parquet'"),
    ("[[data.sources]]\nid = 'x'\nkind = 'hub'", "data.sources.0.rows", "is missing"),
    ("[distill", "", "not TOML"),
    ("extends = 'toy'", "", "extends itself"),
    ("extends = 'nowhere'", "nowhere.toml", "there is no such profile. Profiles: base, "),
    ("extends = ['smollm2']", "extends", "takes the name of one profile"),
])
def test_a_mistake_stops_before_any_work(workshop: Workshop, text: str, key: str, allowed: str) -> None:
    extends = "" if "extends" in text else 'extends = "smollm2"\n'
    path = workshop.write("profiles/toy.toml", extends + text + "\n")
    said = workshop.run("all", code=2)
    assert said.startswith("draftmill: ")
    assert str(path.parent) in said
    assert key in said
    assert allowed in said
    assert "Traceback" not in said
    assert not (workshop.root / "build").exists()


def test_an_unknown_profile_names_those_that_exist(workshop: Workshop) -> None:
    assert "smollm2" in workshop.run("all", "--profile", "smolm2", code=2)


def test_tables_merge_and_lists_are_replaced(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    shop.write("profiles/toy.toml", 'extends = "smollm2"\n[start]\nlayers = [0, 29]\n[distill]\nsteps = 77\n')
    parent, child = (load_profile(name, shop.root / "profiles") for name in ("smollm2", "toy"))
    assert child.start.layers == (0, 29)
    assert child.distill.steps == 77
    assert child.distill.learning_rate == parent.distill.learning_rate
    assert child.name == "toy"


@pytest.mark.parametrize("name", PROFILES)
def test_the_profiles_of_this_repository_are_whole(name: str) -> None:
    assert load_profile(name, ROOT / "profiles").name == name
