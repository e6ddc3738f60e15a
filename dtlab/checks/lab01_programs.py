"""Lab 01, last exercise: programs that should be a ring all-reduce, seen from outside."""

import torch
import torch.distributed as dist

from dtlab.checks import lab01_serial as serial
from dtlab.checks.diagnosis import LETTERS as LETTERS
from dtlab.checks.diagnosis import Programs

SIGNS = {  # what each of them looks like
    "whole tensors sent": "Then every rank would send 3 S, twice what the ring sends, and every value would be right.",
    "joined in order of arrival": "Then each rank would hold all the sums of the ring, and most at the wrong place.",
    "remainder dropped": "Then the last 3 of 7 elements would stay what they were, and fewer bytes would be sent.",
    "adds in the second half": "Then finished sums would have other parts added to them; the bytes would be those of "
                               "the ring.",
    "one neighbour after the other": "Then values and bytes would be right, and the timeline a staircase.",
    "all send first": "Then nothing would come back at all: every rank waits, each in the same call.",
    "right on rank 0 only": "Then rank 0 would hold sums that the others lack.",
    "rounded to float32": "Then all ranks would hold the sums to 7 digits, and half the bytes would be sent.",
    "nothing wrong": "Then values, bytes and timeline would be those of the right program.",
}
PROGRAMS = Programs("lab01.5", SIGNS, {
    "A": "056e68f9", "B": "83395194", "C": "50b6e807", "D": "91de56bf", "E": "93a57ed3", "F": "250fa876",
})
CHOICES, is_right = PROGRAMS.choices, PROGRAMS.is_right


def observed(letter, case):
    """On a rank: what the program of a letter leaves in a tensor; any other letter has the right one."""
    choice = PROGRAMS.ailing(letter)
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.from_numpy(serial.part(case, case["lengths"][0], rank))
    if choice == "whole tensors sent":
        return _whole_tensors(tensor, rank, size)
    cuts = serial.dropped if choice == "remainder dropped" else serial.bounds
    chunks = [tensor[start:end] for start, end in cuts(len(tensor), size)]
    exchange = {"all send first": _send_first, "one neighbour after the other": _in_a_chain}.get(choice, _at_once)
    arrived = [chunks[rank]]
    for step in range(2 * (size - 1)):
        first = rank - step - 1
        sent, theirs = chunks[first % size], chunks[(first - 1) % size]
        received = torch.empty_like(theirs)
        exchange(sent, received, rank, size)
        if step < size - 1 or choice == "adds in the second half":
            theirs += received
        else:
            theirs.copy_(received)
            arrived.append(received)
    if choice == "joined in order of arrival":
        tensor.copy_(torch.cat(arrived))
    return tensor


def _whole_tensors(tensor, rank, size):
    brought, received = tensor.clone(), torch.empty_like(tensor)
    for distance in range(1, size):
        handles = [dist.isend(brought, (rank + distance) % size), dist.irecv(received, (rank - distance) % size)]
        [handle.wait() for handle in handles]
        tensor += received
    return tensor


def _at_once(sent, received, rank, size):
    handles = [dist.isend(sent, (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]
    [handle.wait() for handle in handles]


def _send_first(sent, received, rank, size):
    dist.send(sent, (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)


def _in_a_chain(sent, received, rank, size):
    if rank == 0:
        dist.send(sent, 1)
    dist.recv(received, (rank - 1) % size)
    if rank > 0:
        dist.send(sent, (rank + 1) % size)
