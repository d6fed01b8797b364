from edda.cli import main

main()
