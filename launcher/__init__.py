"""Starts the ranks of a job and looks after them: `horovodish run`, `horovodish check`.

It needs the standard library and, of horovodish, `settings`, `errors`, `version`, `supported`, `launch.output_files`,
`runtime.nccl_library` and `reports.merge_traces`.

    cli             the command `horovodish`: from its arguments to its exit status
    flags           its parsers
    options         the table of the flags that are no settings
    config_file     flags in a file
    run             `horovodish run`: from the options to the exit status
    own_python      commands that run this Python without the modules of the current folder
    hosts/          which hosts a job may use, and which ranks run where
        allocation    hosts and slots, from --hosts or a hostfile
        schedulers    the hosts that Slurm, PBS, LSF or Kubernetes have chosen
        addresses     the network addresses of this host
    mpirun/         mpirun, of whichever MPI
        installation  mpi4py and its MPI, the mpirun that belongs to it; what to do otherwise
        command       what each family of mpirun is told: its arguments and variables
        messages      what it says: why a host did not come up, and what the user should read
        reach         why a host did not come up about which nothing is said: runs a command there
    agents/         processes that are on the hosts already and start MPI's daemons there, where there is no ssh
        agent         the process, its links and its children
        meeting       where agents join, and which host each is on
        program       what mpirun runs in place of ssh
    supervisor/     what mpirun starts in place of each rank, on whichever host
        start         the command for that, and the folder of a run
        supervisor    a small program beside every rank: starts it, passes signals on, reports how it ended
        tcp_end       its end of a link to a launcher on another host
    job/            one run
        job           its processes, and when they are ended
        environment   the variables that the ranks get
        listener      where supervisors connect, and the handshake with whoever connects by TCP
        launcher_end  the launcher's end of the link to one supervisor
        output        what the ranks write, merged into the launcher's output whole lines at a time, and kept
        progress      one line about what the launcher waits for
        waiting       ranks that make others wait outside of collectives
        losses        whether the job goes on when it loses a rank
        mpirun_process  mpirun itself, and what it says
        signals       what the launcher does when it gets a signal
        outcome       how ranks ended, and which of them failed first
        hints         what to do about some exceptions
        conclusion    the last words of a run
    elastic/        a job that goes on without lost ranks and with new ones
        job           one start after the other, and the next one beside the one that trains
        members       which ranks of a start take part, and what they are told when that changes
        policy        what a job asks when it loses a rank: its members decide
        slots         on which slots the next ranks can run
        discovery     hosts that come and go
        events        what has happened, for the user and for programs
    function/       `horovodish.run()`: a Python function on ranks
        run_function  its arguments
        launcher      the process that starts the ranks
        rank          what each rank executes
        on_agents     ranks on hosts where somebody else starts the agents
        ranks         ranks that call one function after the other for this process
        executable    an object that a rank keeps between calls
        exchange      the links between these ranks and this process
        call          the messages on these links
    report/         what is installed
        check         the report of `horovodish check`
        libraries     frameworks, CUDA and Horovod's names; the versions of all
        links         the links between hosts
        round_trip    two ranks that show that ranks can be started

mpirun starts one supervisor per rank, on whichever host, and gives the ranks what MPI needs for finding each other.
Everything else goes over a link between the launcher and each supervisor: the rank's stdin, stdout and stderr, signals,
what it has raised, its exit status. So it is the same with every MPI, no output is lost when mpirun aborts a job, and
when the launcher dies, however it dies, every supervisor sees the end of its link and ends its rank.
"""

if __name__ != "horovodish.launcher":
    raise ImportError(f"this folder is the package horovodish.launcher; do not import it as {__name__}")
