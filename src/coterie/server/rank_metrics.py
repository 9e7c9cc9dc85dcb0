"""What /metrics says of several ranks: the group's generation and faults, and each rank. Nothing for one rank."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from coterie.engine.messages import Stats


def rank_families(prefix: str, model_name: str, stats: Stats) -> Iterator[Metric]:
    """The group's numbers and each rank's."""
    group = stats.group
    if group is None:
        return
    gauges = (
        ("ep_generation", "Generation of the ranks' group; it rises with each loss and return.", group.generation),
        ("ep_ranks_living", "Ranks in the group.", group.living),
        ("ep_detect_seconds", "Last fault: from a rank's last sign of life to its loss being known.",
         group.detect_seconds),
        ("ep_recovery_seconds", "Last fault: from its being known to serving again.", group.recovery_seconds),
    )  # fmt: skip
    for stem, text, value in gauges:
        gauge = GaugeMetricFamily(prefix + stem, text, labels=("model_name",))
        gauge.add_metric((model_name,), value)
        yield gauge
    counters = (
        ("ep_faults", "Ranks lost.", group.faults),
        ("ep_experts_loaded", "Experts loaded to take a lost rank's over.", group.experts_loaded),
        ("ep_experts_moved", "Experts that ranks received from others to even out the load.", stats.experts_moved),
        ("ep_expert_move_cycles", "Times that all experts that should move had moved, or none had to.",
         stats.move_cycles),
        ("ep_expert_moves_failed", "Times that moving experts had to be given up; it is tried again.",
         stats.moves_failed),
        ("ep_sequences_retried", "Sequences that went on on another rank.", group.retried),
        ("ep_sequences_failed", "Sequences that a fault ended with an error.", group.failed),
    )  # fmt: skip
    for stem, text, value in counters:
        counter = CounterMetricFamily(prefix + stem, text, labels=("model_name",))
        counter.add_metric((model_name,), value)
        yield counter
    even = GaugeMetricFamily(
        prefix + "ep_layer_balancedness",
        "Mean rows of the ranks over the busiest one's, of the last window between decisions on moving experts.",
        labels=("model_name", "layer"),
    )
    for layer, value in stats.balancedness.items():
        even.add_metric((model_name, str(layer)), value)
    yield even
    yield from _by_hop(prefix, model_name, stats)
    yield from _by_rank(prefix, model_name, stats)


def _by_hop(prefix: str, model_name: str, stats: Stats) -> Iterator[Metric]:
    """Sums of all ranks; use is their ratio since the start, and rates of both counters give that of a window."""
    labels = ("model_name", "hop")
    sent = CounterMetricFamily(prefix + "ep_sent_bytes", "Bytes of rows and outputs between ranks.", labels=labels)
    could = CounterMetricFamily(
        prefix + "ep_link_capacity_bytes",
        "Bytes that the links would have carried while such payloads were under way, at the rates of the probe.",
        labels=labels,
    )
    use = GaugeMetricFamily(
        prefix + "ep_link_use", "Bytes that were sent over bytes that could have been, since the start.", labels=labels
    )
    for hop, (nbytes, capacity) in stats.hops.items():
        sent.add_metric((model_name, hop), nbytes)
        could.add_metric((model_name, hop), capacity)
        if capacity:
            use.add_metric((model_name, hop), nbytes / capacity)
    yield from (sent, could, use)


def _by_rank(prefix: str, model_name: str, stats: Stats) -> Iterator[Metric]:
    assert stats.group is not None
    labels = ("model_name", "rank", "node")
    serving = GaugeMetricFamily(prefix + "rank_serving", "Whether a rank is in the group.", labels=labels)
    running = GaugeMetricFamily(prefix + "rank_num_requests_running", "Sequences in its batch.", labels=labels)
    waiting = GaugeMetricFamily(prefix + "rank_num_requests_waiting", "Sequences in its queue.", labels=labels)
    usage = GaugeMetricFamily(prefix + "rank_kv_cache_usage_perc", "Used share of its KV cache.", labels=labels)
    for one in stats.group.ranks:
        own = (model_name, str(one.rank), str(one.node))
        serving.add_metric(own, one.state == "serving")
        running.add_metric(own, one.num_running)
        waiting.add_metric(own, one.num_waiting)
        usage.add_metric(own, one.kv_usage)
    yield from (serving, running, waiting, usage)
