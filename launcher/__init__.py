"""Starts the ranks of a job and looks after them: `horovodish run`, `horovodish check`.

It needs the standard library, `horovodish.settings`, `horovodish.errors` and `horovodish.version`, nothing else.

    cli             the command `horovodish`: from its arguments to its exit status
    flags           what the user can ask for, most of it derived from the table of settings
    config_file     flags in a file
    without_effect  flags of Horovod's that are accepted and change nothing
    installation    what is installed: mpi4py and its MPI, the mpirun that belongs to it; what to do otherwise
    hosts           which hosts a job may use, and which ranks run where
    schedulers      the hosts that Slurm, PBS, LSF or Kubernetes have chosen
    host_flags      the flags that say where ranks run and how they are connected
    mpirun          the families of mpirun: their argument lists, and which of their messages only repeat ours
    environment     the variables that the ranks get
    folder          the private folder of a run
    run             `horovodish run`: from what is wanted to the exit status
    job             the processes of one run, and when they are ended
    program         the command that mpirun runs in place of every rank
    reception       where supervisors report, and how those of other hosts prove that they belong to the run
    link            the launcher's end of the link to one supervisor
    outcome         how ranks ended, and which of them failed first
    output          what the ranks write, merged into the launcher's output whole lines at a time, and kept
    absence         why nothing comes from a host
    conclusion      the last words of a run
    supervisor      a small program beside every rank: starts it, passes signals on, reports how it ended
    far_link        its link to a launcher on another host
    run_function    `horovodish.run()`: a Python function on ranks
    function_launcher, function_rank, function_files
                    its launcher, what its ranks execute, and the files between them
    check           the report of `horovodish check`
    libraries       what is installed besides MPI
    round_trip      two ranks that show that ranks can be started

mpirun starts one supervisor per rank, on whichever host, and gives the ranks what MPI needs for finding each other.
Everything else goes over a link between the launcher and each supervisor: the rank's stdin, stdout and stderr, signals,
what it has raised, its exit status. So it is the same with every MPI, no output is lost when mpirun aborts a job, and
when the launcher dies, however it dies, every supervisor sees the end of its link and ends its rank.
"""

if __name__ != "horovodish.launcher":
    raise ImportError(f"this folder is the package horovodish.launcher; do not import it as {__name__}")
