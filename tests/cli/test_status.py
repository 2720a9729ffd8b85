"""The tables of `rollfarm status`."""

from rich.console import Console
from rich.table import Table

from rollfarm import status_tables as tables
from rollfarm import times
from rollfarm.v1 import environment_pb2, llm_proxy_pb2, reward_gateway_pb2

Engine = llm_proxy_pb2.Engine


def lines(table: Table) -> list[str]:
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def test_each_engine_shows_its_state_with_the_reason_and_how_busy_it_is() -> None:
    shown = lines(
        tables.engines(
            [
                Engine(
                    engine_id="gpu-0:7710",
                    address="gpu-0:7710",
                    adapter="vllm",
                    server_version="0.32.0",
                    state=Engine.STATE_SERVING,
                    policy_version=13,
                    slot_count=64,
                    running_count=60,
                    waiting_count=2,
                    kv_cache_usage=0.434,
                    tokens_per_second=7321.5,
                    generated_token_count=12_345_678,
                ),
                Engine(engine_id="gpu-1:7710", state=Engine.STATE_SUSPENDED, detail="it said [no]; tried after 10 s"),
            ]
        )
    )

    assert shown[0] == "engine adapter state version slots running waiting KV tok/s tokens"
    assert shown[1] == "gpu-0:7710 vllm 0.32.0 serving 13 64 60 2 43% 7322 12.3M"
    assert shown[2].startswith("gpu-1:7710 at suspended: it said [no]; tried after 10 s 0 0 0")


def test_each_tenant_shows_its_requests() -> None:
    tenants = [
        llm_proxy_pb2.TenantStatus(tenant="b", queued_count=3, running_count=5),
        llm_proxy_pb2.TenantStatus(running_count=1),
    ]

    assert lines(tables.tenants(tenants)) == ["tenant queued running", "(none) 0 1", "b 3 5"]


def test_each_environment_that_was_played_shows_its_outcomes_and_why_it_is_left_alone() -> None:
    first = environment_pb2.EnvManagerServiceGetStatusResponse(
        environments=[
            environment_pb2.EnvironmentStatus(
                name="lake", running_count=3, ended_count_by_outcome={"OUTCOME_OK": 12, "OUTCOME_STALE": 1}
            ),
            environment_pb2.EnvironmentStatus(
                name="shop",
                ended_count_by_outcome={"OUTCOME_ENV_FAILED": 16},
                suspended=True,
                detail="reset: no [such] file",
            ),
            environment_pb2.EnvironmentStatus(name="never played"),
        ]
    )
    second = environment_pb2.EnvManagerServiceGetStatusResponse(
        environments=[environment_pb2.EnvironmentStatus(name="lake", ended_count_by_outcome={"OUTCOME_OK": 2})]
    )

    assert lines(tables.environments([first, second])) == [
        "environment state playing ok cut short failed unscored aborted cancelled latest failure",
        "lake plays 3 14 0 0 0 0 1",
        "shop suspended 0 0 0 16 0 0 0 reset: no [such] file",
    ]


def test_each_host_shows_how_it_is_reached_and_what_it_plays() -> None:
    Host = environment_pb2.EnvironmentHost
    manager = environment_pb2.EnvManagerServiceGetStatusResponse(
        hosts=[
            Host(address="a:1", kind=Host.KIND_SERVER, healthy=True, environments=["maze", "shop"], running_count=4),
            Host(address="b", kind=Host.KIND_ATTACHED),
        ]
    )

    assert lines(tables.hosts([manager])) == [
        "host kind state playing environments",
        "a:1 server well 4 maze, shop",
        "b attached no answer 0",
    ]


def test_each_reward_shows_what_it_gave_and_each_domain_what_waits() -> None:
    gateway = reward_gateway_pb2.RewardGatewayServiceGetStatusResponse(
        domains=[
            reward_gateway_pb2.DomainStatus(
                domain="maths",
                running_count=2,
                waiting_count=5,
                rewards=[
                    reward_gateway_pb2.RewardStatus(
                        name="maths", scored_count=1500, cached_count=3, timeout_duration=times.duration(2.5)
                    ),
                    reward_gateway_pb2.RewardStatus(
                        name="judge", failed_count=1, timeout_duration=times.duration(30), detail="no verdict"
                    ),
                ],
            )
        ]
    )

    assert lines(tables.rewards(gateway)) == [
        "domain reward scoring waiting scored remembered failed timeout latest failure",
        "maths maths 2 5 1500 3 0 2.5 s",
        "judge 0 0 1 30 s no verdict",
    ]
    assert tables.rewards(None).row_count == 0
