"""Secrets of rewards: used, hidden in what is written, and asked for again."""

import pytest

from jrl.config import as_tree, build_config, config_hash, dump, flatten
from jrl.config.secrets import HIDDEN, hide, reveal, without_secrets
from jrl.errors import UserError

TREE = {
    "data": {"task": "sorting"},
    "rewards": {"a.py:judge": {"api_key": "sk-123", "client": {"password": "pw"}, "max_tokens": 9}},
}


@pytest.mark.parametrize(
    "name", ["key", "API_KEY", "authToken", "hf_token", "client_secret", "password", "credentials"]
)
def test_what_looks_like_a_secret_is_hidden(name):
    assert hide({name: "x"}) == {name: HIDDEN}
    assert hide({name: 3}) == {name: 3}
    assert hide({name: "env:X"}) == {name: "env:X"}


@pytest.mark.parametrize("name", ["keyword", "tokenizer", "url", "monkey"])
def test_other_options_are_kept(name):
    assert hide({name: "x"}) == {name: "x"}


def test_nothing_that_is_written_holds_a_secret_and_the_run_has_it():
    config = build_config(TREE)
    for text in (dump(config), str(flatten(config)), str(as_tree(config, none=True))):
        assert "sk-123" not in text
        assert "'pw'" not in text
        assert HIDDEN in text
        assert "max_tokens" in text
    options = config.rewards["a.py:judge"].options
    assert reveal(options, "rewards.x") == TREE["rewards"]["a.py:judge"]


def test_another_key_is_the_same_run():
    other = {**TREE, "rewards": {"a.py:judge": {**TREE["rewards"]["a.py:judge"], "api_key": "b"}}}
    assert config_hash(build_config(other)) == config_hash(build_config(TREE))
    assert flatten(build_config(other)) == flatten(build_config(TREE))


def test_the_environment_gives_a_secret(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-9")
    assert reveal({"api_key": "env:JUDGE_KEY", "n": 1}, "r") == {"api_key": "sk-9", "n": 1}
    assert reveal({"place": "env:JUDGE_KEY"}, "r") == {"place": "env:JUDGE_KEY"}
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(UserError, match="r.api_key = 'env:JUDGE_KEY': there is no environment"):
        reveal({"api_key": "env:JUDGE_KEY"}, "r")


def test_the_secret_of_a_run_directory_is_asked_for():
    with pytest.raises(UserError, match=r"rewards.j.c.token = .*give it again, or keep it in an e"):
        reveal({"c": {"token": HIDDEN}}, "rewards.j")


@pytest.mark.parametrize("name", ["auth", "Authorization", "bearer", "pwd", "cred", "cookies"])
def test_further_names_of_secrets(name):
    assert hide({name: "x"}) == {name: HIDDEN}
    assert hide({name: ["x", {"a": "y"}]}) == {name: [HIDDEN, {"a": HIDDEN}]}
    assert reveal({name: ["x", {"a": "y"}]}, "r") == {name: ["x", {"a": "y"}]}


@pytest.mark.parametrize(
    "text",
    [
        "Bearer sk-1234567",
        "sk-proj-abcdefgh1234",
        "ghp_0123456789abcdef",
        "https://me:secret@host/v1",
        "eyJhbGciOiJI.eyJzdWIiOiIx.x",
    ],
)
def test_texts_that_are_secrets_whatever_their_name(text):
    assert hide({"x": text, "y": [text]}) == {"x": HIDDEN, "y": [HIDDEN]}
    with pytest.raises(UserError, match="r.y.0 = .*the run directory does not hold it"):
        reveal({"y": [HIDDEN]}, "r")


@pytest.mark.parametrize("text", ["https://host:8000/v1", "hf-internal", "sk-learn", "a@b.c"])
def test_other_texts_are_kept(text):
    assert hide({"x": text}) == {"x": text}


OWN = {
    "data": {"env": "a.py:f", "train": "rows.jsonl", "headers": {"Authorization": "Bearer sk-77x"}},
    "optimizer": {"name": "a.py:g", "auth": "sk-77x"},
    "objective": {"keys": ["sk-77x"]},
    "model": {"network": "a.py:h", "path": "x", "config": {"pwd": "sk-77x"}},
    "rewards": {"a.py:judge": {"keys": ["sk-77x"], "nested": [{"token": "sk-77x"}]}},
}


def test_secrets_of_every_table_of_options_are_hidden():
    config = build_config(OWN)
    for text in (dump(config), str(flatten(config)), str(as_tree(config))):
        assert "sk-77x" not in text
        assert text.count(HIDDEN) == 6
    assert build_config(OWN).data.train == "rows.jsonl"


def test_functions_of_ones_own_get_their_secrets(tmp_path, monkeypatch):
    import optax

    from jrl.config import load_config
    from jrl.train import build

    monkeypatch.setenv("THE_KEY", "sk-77x")
    (tmp_path / "own.py").write_text(
        "import optax\nfrom jrl.data.tasks import get_task\nfrom jrl.methods import get_method\n"
        "seen = []\n"
        "def task(auth):\n    seen.append(auth)\n    return get_task('sorting')\n"
        "def method(api_key):\n    seen.append(api_key)\n    return get_method('grpo')\n"
        "def sgd(rate, tokens):\n    seen.append(tokens)\n    return optax.sgd(rate)\n"
    )
    sizes = "{layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}"
    module = f"{tmp_path}/own.py"
    config = load_config(
        None,
        [
            *(f"data.task='{module}:task'", "data.auth='env:THE_KEY'", f"model.config={sizes}"),
            *(f"method='{module}:method'", "objective.api_key=abc"),
            *(f"optimizer.name='{module}:sgd'", "optimizer.tokens=['env:THE_KEY']"),
        ],
    )
    run = build.setup(config)
    assert isinstance(run.optimizer, optax.GradientTransformation)
    arguments = _module(module).seen
    assert {"sk-77x", "abc"} <= {x for x in arguments if isinstance(x, str)}
    assert ["sk-77x"] in arguments
    assert "THE_KEY" in dump(config)
    assert "abc" not in dump(config)


def _module(path):
    import pathlib

    from jrl.user_code import _of_file

    return _of_file(pathlib.Path(path).resolve())


SECRETS = {
    "accesskey": "abcd1234",
    "authtoken": "abcd1234",
    "privateKey": "abcd1234",
    "judge": "https://host/v1?api_key=abcd1234efgh",
    "webhook": "https://host/x?page=2&token=abcd1234efgh",
    "google": "AIzaSyA1234567890abcdefghijklmnopqrstu",
    "groq": "gsk_abcdef1234567890abcdef",
    "server": ["python", "server.py", "--token", "abcd1234"],
    "line": "python server.py --api-key abcd1234 --port 80",
    "option": ["serve", "--api-key=abcd1234"],
    "header": "X-Api-Key: abcd1234",
    "database": "Server=x;User=u;Password=abcd1234;",
    "headers in a list": ["curl", "-H", "Authorization: Bearer abcd1234"],
    "a command": "curl -H 'Authorization: Bearer abcd1234' http://host",
    "within a text": "ask with sk-abcdefghijk1234, please",
    "json": '{"url": "http://host", "api_key": "abcd1234"}',
    "signed": "https://host/blob?sv=2020&sig=abcd1234",
    "signed by amazon": "https://host/x?X-Amz-Date=1&X-Amz-Signature=abcd1234",
    "sentry": "https://abcdefabcdefabcd1234abcd@o1.ingest.host/5",
    "storage": "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=abcd1234==",
    "a file of a key": "first\n-----BEGIN OPENSSH PRIVATE KEY-----\nabcd1234",
    "gitlab": "glpat-abcdefgh1234ABCD",
    "gcloud": "ya29.abcdefghijk1234",
    "a Hub token": "hf_aBcDeFgHiJkLmNoPqRsTuVwXyZaBcDeFgH",
    "a login": ["curl", "-u", "me:abcd1234", "http://host"],
    "a login in a text": "curl -u me:abcd1234 http://host",
    "pairs": [["accept", "text"], ["x-api-key", "abcd1234"]],
    "a named value": {"name": "API_KEY", "value": "abcd1234"},
    "behind a hash": "https://host/page#access_token=abcd1234",
    "code": "https://host/api/f?code=abcd1234abcd==",
    "slack": "https://hooks.slack.com/services/T000/B000/abcd1234abcd1234",
    "telegram": "https://api.telegram.org/bot123456:abcd1234abcd1234abcd/sendMessage",
    "a call": "Client(api_key='abcd1234')",
    "lines": "model: x\napi_key: abcd1234\nport: 80",
    "vault": "hvs.abcdefgh1234abcd",
    "mailgun": "key-0123456789abcdef0123456789abc1234"[:36],
    "databricks": "dapi0123456789abcdef0123456789abcdef",
    "wandb": "wandb_v1_abcd1234abcd1234",
    "db_pass": "abcd1234",
    "registry_pass": "abcd1234",
    "openaikey": "abcd1234",
    "github_pat": "abcd1234",
    "SMTP_PASS": "abcd1234",
    "sentry_dsn": "abcd1234",
    "a password in a query": "https://host/x?user=me&pass=abcd1234",
    "small letters": "token abcd1234abcd",
    "a bot": "123456789:AAabcd1234abcd1234abcd1234abcd1234x",
    "a sandbox": "e2b_abcd1234abcd1234",
    "a short word": "Server=x;User=u;Pass=abcd1234;",
    "a short flag": ["s", "--pass", "abcd1234"],
    "a short option": ["s", "--pass=abcd1234"],
    "gh_pat": "abcd1234",
    "a header in quotes": "serve -H 'X-Api-Key: abcd1234'",
    "a crawler": "fc-0123456789abcdef0123456789abc123"[:31] + "1234",
    "a refresh token": "1//0abcdefghijklmnop1234",
    "APIKey": "abcd1234",
    "HFToken": "abcd1234",
    "DBPassword": "abcd1234",
    "JWTs": "abcd1234",
    "oauth": "abcd1234",
    "dbpass": "abcd1234",
    "pass": "abcd1234",
    "password": 12341234,
    "json of a command": '{"command": ["serve", "--api-key", "abcd1234"]}',
    "json of headers": '[["x-api-key", "abcd1234"]]',
    "json of variables": '{"env": [{"name": "API_KEY", "value": "abcd1234"}]}',
    "json with a number": '{"api_key": 12341234}',
    "json in json": '{"settings": "{\\"token\\": \\"abcd1234\\"}"}',
    "by pat": ["serve", "--pat", "abcd1234"],
    "an app of slack": "xapp-1-abcd1234-abcd1234",
    "gitlab's deployments": "gldt-abcdefgh1234ABCD",
    "google's client": "GOCSPX-abcdefgh1234ABCD",
    "refresh of github": "ghr_0123456789abcdef1234",
}
HARMLESS = {
    "eos_token": "</s>",
    "answer_key": "solution",
    "python": ["python", "-u", "server.py"],
    "docker": "docker run -u 1000:1000 image",
    "columns": ["token", "answer"],
    "store": "key-value-store-2024-10",
    "token_level": "mean",
    "token_mask": "own",
    "pass": "yes",
    "pass_rate": "high",
    "pat": "a+",
    "file_pat": "*.txt",
    "compile_pass": "fusion",
    "first_pass": "greedy",
    "basic": "basic arithmetic",
    "language": "https://host/x?code=en&country_code=DE",
    "words": "Score it.\nKey: points\nToken: none",
    "max_tokens": 5,
    "monkey": "bananas",
    "keyboard": "qwerty",
    "tokenizer": "bytes",
    "url": "http://host:8000/v1?page=2&max_tokens=5",
    "command": ["serve", "--max-tokens", "500", "--name", "x"],
    "ask": "The key question: what is 2 + 2?",
    "model": "hf-internal-testing/tiny-random-LlamaForCausalLM-1",
    "package": "sk-learn",
    "mail": "somebody@example.org",
    "code": "signature = inspect.signature(f)",
    "certificate": "-----BEGIN CERTIFICATE-----",
    "turns": '{"role": "user", "content": "hi"}',
    "place": "gs://bucket/path@generation",
    "system_prompt": "Write key=value pairs.",
    "form": "Answer with token=word",
    "layers": "fc-layers-1024",
    "stage": ["run", "--pass", "2"],
    "listed": '["token", "answer"]',
    "counted": '{"max_tokens": 131072}',
    "max_tokens_of_all": 1_000_000,
    "compass": "north",
    "numKVHeads": "8",
}


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_are_hidden_by_their_kind(name):
    hidden = hide({name: SECRETS[name]})[name]
    assert "1234" not in str(hidden).replace("123456:", "")
    assert HIDDEN in str(hidden)
    if isinstance(hidden, list):
        assert hidden[0] == SECRETS[name][0]  # the rest of a command stays


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_resembles_a_secret_is_written(name):
    assert hide({name: HARMLESS[name]}) == {name: HARMLESS[name]}
    assert reveal({name: HARMLESS[name]}, "data") == {name: HARMLESS[name]}


@pytest.mark.parametrize(
    "value",
    [
        ["serve", "--token", "env:THE_KEY"],
        [["x-api-key", "env:THE_KEY"]],
        {"name": "API_KEY", "value": "env:THE_KEY"},
    ],
)
def test_the_environment_gives_what_stands_beside_a_name(value, monkeypatch):
    """Wherever a secret is hidden, a variable may stand in its place."""
    monkeypatch.setenv("THE_KEY", "sk-9")
    assert hide({"x": value}) == {"x": value}
    assert "sk-9" in str(reveal({"x": value}, "r"))


@pytest.mark.parametrize(
    "text",
    [
        "rewards.j.api_key = 'abcd1234': no such key",
        'the server says {"access_token": "abcd1234"}',
        "OPENAI_API_KEY=abcd1234 is refused",
        "x-api-key: abcd1234",
        "the command --token abcd1234 ends with 1",
        "https://host/x?X-Amz-Signature=abcd1234",
        "password = 'correct horse abcd1234': no such key",
        "password = 'it\\'s abcd1234' is short",
        'password: "it\'s abcd1234"',
        "{'client_secret': 'horse abcd1234', 'n': 3}",
        "password = 'correct horse abcd1234",
        "token = 'abcd1234'",
        "rewards.j.private_key = 'abcd1234'",
        "authorization=Bearer abcd1234",
        "the headers x-api-key: abcd1234, accept: text",
        "api_key: abcd1234: refused",
        "MCP server ['npx', '-y', '--api-key', 'abcd1234', '--port', '80'] does not answer",
        "MCP server ['curl', '-u', 'me:abcd1234'] does not answer",
        "the command --password 'horse abcd1234' ends with 1",
    ],
)
def test_what_a_message_says_of_a_secret_by_its_name_is_hidden(text):
    shown = without_secrets(text)
    assert "abcd1234" not in shown
    assert HIDDEN in shown
    assert shown.split()[0] == text.split()[0] or HIDDEN in shown.split()[0]


def test_messages_hold_no_secrets():
    variable = "rewards.j.api_key = 'env:KEY': there is no environment variable KEY; set it"
    assert without_secrets(variable) == variable
    text = "rewards.j.url = 'http://me:pw12@host/v1?api_key=pw12&n=3' refuses sk-abcdefghpw12345"
    hidden = without_secrets(text)
    assert "pw12" not in hidden
    assert "n=3" in hidden
    plain = "train.max_tokens = 'x'; see http://host/page?token_count=3 or data.answer_key = 'y'"
    assert without_secrets(plain).startswith("train.max_tokens = 'x'; see http://host/page?token_c")
    assert without_secrets("objective.key = 'x'; use 3") == "objective.key = 'x'; use 3"


@pytest.mark.parametrize(
    "text",
    [
        "data.api_key: extra fields not permitted",
        "rewards.secret: unknown key",
        "authorization: must be text",
        "authorization: extra fields not permitted",
        "rewards.j.api_key = None: give a text",
        "rewards.j.password = true is no text",
        "rewards.j.secret: line 12 has 3456 of them",
        "sampling.max_new_tokens = 'infinite'; give a number",
        "data.answer_key = 'final_answer'; there is no such field",
        "rewards.j.key_variable = 'THE_JUDGE_KEY' is not set",
        "data.file_pat = 'rows-*.jsonl' matches no file",
        "data.server = ['npx', '--api-key', 'env:THE_KEY'] does not answer",
        "MCP server ['npx', '--max-tokens', '500', '--token', '5'] does not answer",
    ],
)
def test_what_a_message_says_besides_is_shown(text):
    assert without_secrets(text) == text


def test_the_rest_of_a_message_with_a_secret_is_shown():
    text = "rewards.j.api_key = 'two words': no such key; give api_key = None"
    assert without_secrets(text) == text.replace("two words", HIDDEN)
    assert without_secrets("API_KEY=abcd: refused") == f"API_KEY={HIDDEN}: refused"
