"""The fast hazards against those derived from what actions read and write."""

from itertools import pairwise

import pytest

from mixfleet.model.spec import Model, Param
from mixfleet.plan import Pipeline, Plan, Sharding, Stage
from mixfleet.program.action import dependencies, stream_of
from mixfleet.program.layout import Layout
from mixfleet.program.lower import lower
from mixfleet.sim.hazards import hazards
from sim_toys import block


def reachable(actions, needs):
    """Per action, all that must have ended before it starts."""
    last, before = {}, []
    for i, action in enumerate(actions):
        direct = set(needs[i]) | {last[stream_of(action)]} if stream_of(action) in last else set(needs[i])
        before.append(frozenset(direct.union(*(before[j] for j in direct))))
        last[stream_of(action)] = i
    return before


def models():
    plain = [block(i, 60) for i in range(4)]
    yield Model(name="plain", family="toy", blocks=tuple(plain))
    head = plain[3].replace(params=(*plain[3].params, Param(name="t", shape=(60,), tied="b0/w")))
    yield Model(name="tied", family="toy", blocks=(*plain[:3], head))


@pytest.mark.parametrize("model", list(models()), ids=lambda m: m.name)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 4), (1, 2, 4), (2, 2, 2), (4, 4, 4), (2, 2, 4), (4, 1, 4)])
@pytest.mark.parametrize("cuts", [(0, 4), (0, 2, 4), (0, 1, 3, 4)])
def test_hazards_order_actions_as_dependencies_do(model, schedule, degrees, cuts):
    stages = tuple(Stage(blocks=(a, b), devices=tuple(range(4 * i, 4 * i + 4)))
                   for i, (a, b) in enumerate(pairwise(cuts)))
    w, g, o = degrees
    plan = Plan(schedule=schedule, sharding=Sharding(weights=w, gradients=g, optimizer=o, prefetch=len(cuts) - 2),
                pipelines=(Pipeline(samples=5, micro_batch=1, replicas=4, stages=stages),))
    layout = Layout(plan, model)
    for role in lower(plan, model, layout).roles:
        slow = dependencies(role.actions, layout, layout.units_of_stage(role.pipeline, role.stage))
        fast = hazards(role.actions, layout)
        assert reachable(role.actions, fast) == reachable(role.actions, slow)
