"""The contract between rackmount's core and everything that is mounted in it.

Light by design: importing this package imports neither torch nor any plugin. Descriptors, hookspecs
and the plugin manager live at the top; the torch half (sockets, mount, formats, reference) is
imported by its own path.
"""

import pluggy

API_VERSION = "1.0"
"""Version of the contract. Plugins state the range they were written for in `Requires-Dist:
rackmount-registry`."""

ENTRY_POINT_GROUP = "rackmount"

hookimpl = pluggy.HookimplMarker("rackmount")
hookspec = pluggy.HookspecMarker("rackmount")
