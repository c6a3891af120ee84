"""What was deployed is kept exactly, and found again."""

from pathlib import Path

import pytest

from cluster import deploy_command
from cluster.cli import app
from cluster.config import ClusterConfig, load_config
from cluster.config_sources import ConfigError
from cluster.deploy_command import HowToReplace
from cluster.releases import Release, Releases, digest_of
from cluster.start_error import StartError

ADDRESS = "10.0.0.1:6379"


def config_for(*assignments: str) -> ClusterConfig:
    return load_config(assignments=(f"cluster.ray_address={ADDRESS}", *assignments), environ={})


def release(digest: str, **changes: object) -> Release:
    facts = {
        "at": "2026-01-01T00:00:00+00:00",
        "digest": digest,
        "build": "b",
        "version": "1",
        "ray_address": ADDRESS,
        "is_rollback": False,
        "is_ready": True,
    }
    return Release(**{**facts, **changes})  # type: ignore[arg-type]


def test_equal_configurations_have_one_digest() -> None:
    assert digest_of(config_for("decode.replicas=2")) == digest_of(config_for("decode.replicas=2"))
    assert digest_of(config_for("decode.replicas=2")) != digest_of(config_for("decode.replicas=3"))
    local = [load_config(assignments=[f"cluster.token_file={name}"], environ={}) for name in "ab"]
    assert digest_of(local[0]) == digest_of(local[1])
    joined = [config_for(f"cluster.token_file={name}") for name in "ab"]
    assert digest_of(joined[0]) != digest_of(joined[1])


def test_a_release_comes_back_as_it_was(tmp_path: Path) -> None:
    releases = Releases(tmp_path / "releases")
    config = config_for("decode.replicas=2", "ingress.http_port=8100")
    digest = releases.keep(config)
    assert releases.keep(config) == digest
    assert releases.load(digest) == releases.load(digest[:6]) == config
    assert (tmp_path / "releases").stat().st_mode & 0o077 == 0


def test_a_release_that_was_changed_is_refused(tmp_path: Path) -> None:
    releases = Releases(tmp_path)
    digest = releases.keep(config_for())
    file = tmp_path / f"{digest}.yaml"
    file.chmod(0o600)
    file.write_text(file.read_text().replace("http_port: 8000", "http_port: 8001"))
    with pytest.raises(ConfigError, match="was changed"):
        releases.load(digest)
    for wrong in ("0" * 16, "../x", "*"):
        with pytest.raises(ConfigError, match="none of that name"):
            releases.load(wrong)


def test_the_previous_one_is_the_last_other_that_served_there(tmp_path: Path) -> None:
    releases = Releases(tmp_path)
    with pytest.raises(ConfigError, match=f"no earlier release that served on {ADDRESS}"):
        releases.previous(ADDRESS)
    for each in (
        release("first"),
        release("second"),
        release("elsewhere", ray_address="auto"),
        release("broken", is_ready=False),
        release("third"),
        release("third"),
    ):
        releases.note(each)
    assert releases.previous(ADDRESS) == "second"
    releases.note(release("fourth", is_ready=False))
    assert releases.previous(ADDRESS) == "third"
    # Twice back is forth again.
    releases.note(release("third", is_rollback=True))
    assert releases.previous(ADDRESS) == "second"
    with pytest.raises(ConfigError):
        releases.previous("auto")


def test_a_torn_line_of_history_is_passed_over(tmp_path: Path) -> None:
    releases = Releases(tmp_path)
    releases.note(release("first"))
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"at": "2026\n{"other": 1}\n[]\n')
    releases.note(release("second"))
    assert [each.digest for each in releases.history(ADDRESS)] == ["first", "second"]


class FakeCluster:
    """Takes what is deployed; fails when told to."""

    def __init__(self) -> None:
        self.deployed: list[ClusterConfig] = []
        self.ways: list[object] = []
        self.failure = self.refusal = ""

    def replace(self, config: ClusterConfig, *others: object) -> None:
        self.deployed.append(config)
        self.ways.append(others[-1])
        if self.failure:
            raise deploy_command._NotServedError(self.failure)
        if self.refusal:
            raise StartError(self.refusal)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    fake = FakeCluster()
    monkeypatch.setattr(deploy_command, "_replace", fake.replace)
    monkeypatch.setattr(deploy_command.preflight, "check", lambda _: None)
    monkeypatch.setattr(deploy_command, "prepare", lambda config, *_: config)
    return fake


def run(tmp_path: Path, *arguments: str) -> int:
    """The command itself, on the real terminal's descriptors."""
    with pytest.raises(SystemExit) as left:
        app([*arguments, "--history", str(tmp_path)])
    return int(left.value.code or 0)


def deploy(tmp_path: Path, *assignments: str) -> int:
    keys = [f"--set={each}" for each in (f"cluster.ray_address={ADDRESS}", *assignments)]
    return run(tmp_path, "deploy", *keys)


def test_a_rollback_deploys_exactly_what_served_before(
    tmp_path: Path, cluster: FakeCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    assert deploy(tmp_path, "decode.replicas=2") == 0
    assert deploy(tmp_path, "decode.replicas=3") == 0
    cluster.failure = "no such GPU"
    assert deploy(tmp_path, "decode.replicas=4") == 1
    assert "no such GPU; `relevo rollback` goes back" in capfd.readouterr().err
    cluster.failure = ""
    assert run(tmp_path, "rollback", "--address", ADDRESS) == 0
    assert [config.decode.replicas for config in cluster.deployed] == [2, 3, 4, 3]
    assert cluster.deployed[3] == cluster.deployed[1]
    first = digest_of(cluster.deployed[0])
    assert run(tmp_path, "rollback", first, "--address", ADDRESS) == 0
    assert cluster.deployed[4] == cluster.deployed[0]
    history = Releases(tmp_path).history(ADDRESS)
    assert [each.is_rollback for each in history] == [False, False, False, True, True]
    assert [each.is_ready for each in history] == [True, True, False, True, True]


def test_what_was_refused_is_no_release(
    tmp_path: Path, cluster: FakeCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    assert deploy(tmp_path) == 0
    cluster.refusal = "the nodes cannot hold every replica"
    assert deploy(tmp_path, "decode.num_cpus=64") == 2
    assert "relevo deploy: the nodes cannot hold" in capfd.readouterr().err
    assert [each.is_ready for each in Releases(tmp_path).history(ADDRESS)] == [True]


def test_more_is_done_only_where_it_is_asked_for(tmp_path: Path, cluster: FakeCluster) -> None:
    assert deploy(tmp_path) == 0
    arguments = ("deploy", "--set", f"cluster.ray_address={ADDRESS}")
    assert run(tmp_path, *arguments, "--restart") == 0
    assert run(tmp_path, *arguments, "--wait-for-nodes") == 0
    assert cluster.ways == [
        HowToReplace(),
        HowToReplace(restarts=True),
        HowToReplace(waits_for_nodes=True),
    ]


def test_the_history_is_listed(
    tmp_path: Path, cluster: FakeCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    assert deploy(tmp_path) == 0
    assert run(tmp_path, "rollback", "--list", "--address", ADDRESS) == 0
    assert digest_of(cluster.deployed[0]) in capfd.readouterr().out


def test_code_does_not_go_back_with_a_configuration(
    tmp_path: Path, cluster: FakeCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    releases = Releases(tmp_path)
    old = releases.keep(config_for())
    releases.note(release(old, build="0123"))
    assert deploy(tmp_path, "decode.replicas=2") == 0
    assert run(tmp_path, "rollback", "--address", ADDRESS) == 0
    assert "served by build 0123" in capfd.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["deploy"], "ray_address is local"),
        (["deploy", "--set", "model.idd=x"], "did you mean"),
        (["rollback"], "no earlier release that served on auto"),
        (["rollback", "0" * 16], "none of that name"),
    ],
)
def test_what_cannot_be_deployed_is_one_line(
    tmp_path: Path, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, *arguments) == 2
    assert message in capfd.readouterr().err
