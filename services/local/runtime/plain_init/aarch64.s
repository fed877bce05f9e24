    mov x8, #167            // prctl(PR_SET_DUMPABLE, 0)
    mov x0, #4
    mov x1, #0
    svc #0
    sub sp, sp, #32         // struct sigaction: SIG_IGN, no flags, no restorer, no mask
    mov x1, #1
    stp x1, xzr, [sp]
    stp xzr, xzr, [sp, #16]
    mov x8, #134            // rt_sigaction(SIGCHLD, sp, NULL, 8)
    mov x0, #17
    mov x1, sp
    mov x2, #0
    mov x3, #8
    svc #0
    ldr w19, lifeline
    mov x8, #436            // close_range(3, lifeline - 1, 0)
    mov x0, #3
    sub w1, w19, #1
    mov x2, #0
    svc #0
    mov x8, #436            // close_range(lifeline + 1, ~0, 0)
    add w0, w19, #1
    mov w1, #-1
    mov x2, #0
    svc #0
again:
    mov w1, #1              // struct pollfd
    stp w19, w1, [sp]
    mov x8, #73             // ppoll(sp, 1, NULL, NULL, 8)
    mov x0, sp
    mov x1, #1
    mov x2, #0
    mov x3, #0
    mov x4, #8
    svc #0
    mov x8, #63             // read(lifeline, sp, 8)
    mov w0, w19
    mov x1, sp
    mov x2, #8
    svc #0
    cmp w0, #0
    b.gt again
    cmn w0, #11             // EAGAIN
    b.eq again
    cmn w0, #4              // EINTR
    b.eq again
    mov x8, #94             // exit_group(0)
    mov x0, #0
    svc #0
lifeline:
    .word 0x7f7f7f7f
