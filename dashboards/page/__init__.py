"""The live page: `seismograd serve` shows the runs of a folder, live and finished, in a browser.

`server` starts it, `api` is its JSON (docs/api.md), `safety` what it refuses. `columns` holds a run's decoded rows,
`queries` brings them to the resolution of a screen, `runs` lists them, `story` says in words what was found, `live`
sends what is new. static/ is the page itself: plain modules, no build step, nothing loaded from elsewhere.
"""
