"""For the tests of your workflows: virtual time and crash points."""

from edda.testing.app import VirtualApp
from edda.testing.clock import VirtualClock
from edda.testing.crash import CrashPoints, How, Point, SimulatedCrash

__all__ = ["CrashPoints", "How", "Point", "SimulatedCrash", "VirtualApp", "VirtualClock"]
