"""Schedules that once failed, each for a fault of the product that is mended since: what still holds of them is tried
ever after. They are kept as they were shortened, for what a seed draws may change. A change
of the simulated Linux can take a case's teeth: the faults that must be found are in planted.py."""

from __future__ import annotations

from tests.world.schedule import Command, Fault, Job, Schedule

LINGERS = ("forks", "1", "3", "lingers")
FAILED: dict[str, Schedule] = {
    "a stop told of a job that was resumed meanwhile that it had ended": Schedule(
        1,
        0,
        (Job("job-0", ("exit", "7", "0.5")),),
        (
            Command(0.01, "detach", "job-0"),
            Command(3.0, "resume", "job-0", word="blind"),
            Command(3.0, "stop", "job-0", 0.5),
        ),
        (),
    ),
    "a lease was not looked after while what the job had left was swept": Schedule(
        514,
        1,
        (
            Job("job-0", LINGERS, gpus=("0",), queue=True),
            Job("job-1", ("exit", "0"), gpus=("auto:1",), queue=True),
        ),
        (
            Command(0.02826330084710618, "detach", "job-0"),
            Command(0.10888320605780191, "launch", "job-1"),
        ),
        (Fault("damage", at_s=1.319802358887116, word="lease other"),),
    ),
    "a job without its status.json was resumed as its first attempt": Schedule(
        2099,
        0,
        (Job("job-1", ("stubborn", "1.5")),),
        (
            Command(0.08301325982988104, "detach", "job-1"),
            Command(7.5725026309233865, "resume", "job-1", word="apart"),
        ),
        (Fault("damage", at_s=7.1064023699149885, word="status.json gone"),),
    ),
    "a job without its status.json was launched once more": Schedule(
        144,
        1,
        (Job("job-0", ("launcher", "4", "orderly", "1"), ranks=4),),
        (
            Command(0.03569998421881926, "launch", "job-0"),
            Command(691200.7476252674, "again", "job-0"),
        ),
        (Fault("damage", at_s=691200.2228918431, word="status.json gone"),),
    ),
    "a job was resumed with code that a power cut had emptied": Schedule(
        309,
        0,
        (Job("job-0", ("stubborn", "1.5")),),
        (
            Command(0.03490639011074479, "detach", "job-0"),
            Command(2.034906390110745, "resume", "job-0", word="apart"),
        ),
        (Fault("reboot", at_s=1.590013055815311),),
    ),
    "a job was launched with a data set that a power cut had filled with zeros": Schedule(
        19,
        0,
        (Job("job-0", ("exit", "0"), includes=True), Job("job-1", ("exit", "0"), includes=True)),
        (Command(0.01, "detach", "job-0"), Command(2.0, "detach", "job-1")),
        (Fault("reboot", at_s=1.0),),
    ),
    "an attempt was told of twice when its supervisor was killed while it swept": Schedule(
        399,
        0,
        (Job("job-0", ("forks", "3", "20", "mixed")),),
        (Command(0.008960965777002516, "detach", "job-0"), Command(3.26445287259039, "ps", "job-0")),
        (Fault("kill", "supervisor", 352),),
    ),
    "a lease of which half was gone kept nobody out": Schedule(
        100816,
        1,
        (Job("job-0", LINGERS, gpus=("0",), queue=True), Job("job-1", LINGERS, gpus=("auto:1",), queue=True)),
        (Command(0.0, "launch", "job-0"), Command(0.0, "launch", "job-1")),
        (Fault("damage", at_s=0.9855064055945681, word="lease cut"),),
    ),
    "a stop removed the folder of a job that had been launched meanwhile": Schedule(
        106790,
        2,
        (
            Job("job-0", ("forks", "2", "1", "sleep"), gpus=("auto:2",), queue=True),
            Job("job-1", ("launcher", "2", "stubborn", "1.5"), ranks=2, gpus=("0",), queue=True),
            Job("job-2", ("orderly", "1"), gpus=("0",), queue=True),
        ),
        (
            Command(0.0, "launch", "job-0"),
            Command(0.0, "launch", "job-1"),
            Command(0.03527407548274213, "detach", "job-2"),
            Command(1.0, "again", "job-1"),
            Command(1.035274075482742, "again", "job-2"),
            Command(2.035274075482742, "stop", "job-2"),
        ),
        (Fault("reboot", at_s=0.011988765259328904),),
    ),
    "a follower wrote of a launch that was under way that it was lost": Schedule(
        121833,
        1,
        (
            Job("job-0", LINGERS, gpus=("0",), queue=True),
            Job("job-1", ("launcher", "2", "exit", "3"), ranks=2, gpus=("auto:1",), queue=True),
            Job("job-2", ("talks", "4", "0.1"), gpus=("auto:1",), queue=True),
        ),
        (
            Command(0.0, "launch", "job-0"),
            Command(0.0, "launch", "job-1"),
            Command(0.0, "launch", "job-2"),
            Command(0.05, "again", "job-0"),
            Command(0.2, "stop", "job-1", 0.0),
            Command(0.20811232761517406, "logs", "job-2"),
            Command(0.7858417672426703, "logs", "job-0"),
        ),
        (),
    ),
    "a supervisor that was halted before it began ran a job again that had ended meanwhile": Schedule(
        133185,
        0,
        (Job("job-0", ("launcher", "2", "exit", "0"), ranks=2),),
        (Command(0.0, "launch", "job-0"),),
        (Fault("halt", "supervisor", 1, value=20.0), Fault("kill", "agent", 189)),
    ),
}
