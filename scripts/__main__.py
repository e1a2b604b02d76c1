"""`python -m scripts rollout …`: the `pastcast` command from the folder it runs in.

For submitted jobs, where the code is what was uploaded and nothing of ours is installed.
"""

from scripts.cli import main

main()
