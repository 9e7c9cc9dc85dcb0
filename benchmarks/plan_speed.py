"""How fast the planner answers: simulated steps a second, and whole commands from start to exit.

    python benchmarks/plan_speed.py [--requests 3000] [--no-commands]

Steps: 1, 8 and 32 ranks that step together, with 1, 4 and 8 requests a second on each (1,000 tokens in, 300 out,
lengths that vary by half), step times by formula. A step of all ranks counts once; "rank steps" count each rank's.
Commands run in processes of their own, once each, as a user starts them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from coterie.planner.simulate import Policy, StepTime, simulate
from coterie.planner.workload import Workload, draw

COST = StepTime(lambda n, context, p, pairs: 1e-7 * context + 1e-9 * pairs, lambda n, p: 0.005 + 2e-5 * (n + p))
COMMANDS = (
    "memory r1 --hw b200 -n 32",
    "step r1 --hw b200 -n 32 --batch 512",
    "search r1 --hw b200 -n 8 --tpot 50 --ttft 5000 --skew uniform",
    "search r1 --hw b200 -n 256 --tpot 50 --ttft 5000 --skew uniform",
    "serve r1 --hw b200 -n 8 --rate 4",
    "serve r1 --hw b200 -n 8 --tpot 50 --ttft 5000",
)


def steps_a_second(ranks: int, rate: float, requests: int) -> float:
    """Simulated steps of all ranks together a second."""
    drawn = draw(Workload(rate=rate * ranks, isl=1000, osl=300, requests=requests, spread_isl=0.5, spread_osl=0.5))
    policy = Policy(token_budget=2048, max_running=128, cache_tokens=200_000, ranks=ranks)
    begun = time.perf_counter()
    run = simulate(drawn, policy, COST)
    return run.steps / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--no-commands", action="store_true")
    options = parser.parse_args()
    print("ranks  requests/s a rank      steps/s  rank steps/s")
    for ranks in (1, 8, 32):
        for rate in (1.0, 4.0, 8.0):
            speed = steps_a_second(ranks, rate, options.requests)
            print(f"{ranks:5d}  {rate:17g}  {speed:11,.0f}  {speed * ranks:12,.0f}")
    for command in () if options.no_commands else COMMANDS:
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-m", "coterie", "plan", *command.split()], check=True, capture_output=True)
        print(f"{time.perf_counter() - begun:5.2f} s  plan {command}")


if __name__ == "__main__":
    main()
