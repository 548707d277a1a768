"""Rows that are preempted again and again, whatever memory there is."""

from itertools import count


def preempt_often(engine, every=4):
    """`engine`, whose youngest row is preempted once in `every` rounds that have several."""
    preempt, rounds = engine.room.preempt, count(1)

    def more(running):
        gone = preempt(running)
        left = [row for row in running if row not in gone]
        if len(left) > 1 and next(rounds) % every == 0:
            gone.append(max(left, key=lambda row: row.id))
            engine.room.release(gone[-1])
        return gone

    engine.room.preempt = more
    return engine
