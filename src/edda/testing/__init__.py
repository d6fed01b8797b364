"""Virtual time and crash points for the tests of your workflows."""

from edda.testing.app import VirtualApp, VirtualClock
from edda.testing.crash import CrashMode, CrashPoint, CrashPoints, SimulatedCrash

__all__ = ["CrashMode", "CrashPoint", "CrashPoints", "SimulatedCrash", "VirtualApp", "VirtualClock"]
